"""`python -m userspace_proxy`"""

from userspace_proxy.cli.main import main

if __name__ == "__main__":
    main()
