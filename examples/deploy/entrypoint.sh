#!/bin/sh
# Puts the keys that callers must send where art-patch accepts them, then becomes the command it was given.
#
# art-patch wants a file that nobody else can read, and secrets are mounted in every way: mode 0444 by Docker Swarm,
# Podman and Kubernetes, with the owner and mode of the host's file by Compose. So the secrets are copied. Without one a
# key is made. It lies in the volume so that a server or proxy that comes after this one has the same.
set -eu
umask 077

provide() { # SECRET KEY
    if [ -e "$1" ] && [ ! -r "$1" ]; then
        echo "entrypoint: user $(id -u) cannot read $1; make it readable: it is copied to $2, mode 600" >&2
        exit 2
    fi
    new=$(mktemp "$2.XXXXXX") # not by the process id: it is the same one in each container
    if [ -r "$1" ]; then
        cat "$1" >"$new" && mv "$new" "$2"
    elif [ ! -s "$2" ]; then
        head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$new"
        # `ln` fails where another container was quicker: all use the first one.
        ln "$new" "$2" 2>/dev/null || true
    fi
    rm -f "$new"
}

provide "${API_KEY_SECRET:-/run/secrets/art_patch_api_key}" "${ART_PATCH_HOME:-/data}/api.key"
provide "${PROXY_KEY_SECRET:-/run/secrets/art_patch_proxy_key}" "${ART_PATCH_HOME:-/data}/proxy.key"
unset -f provide
exec "$@"
