#!/bin/sh
# Run a command as root of a user namespace of its own, so that tests can make network namespaces without being root.
# The tmpfs on /run is for the lock of iptables and for the names of network namespaces.
exec unshare -Urnm sh -c 'mount -t tmpfs tmpfs /run && exec "$@"' sh "$@"
