"""`python -m userspace_proxy`"""

from userspace_proxy.cli.main import main

main()
