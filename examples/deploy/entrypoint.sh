#!/bin/sh
# Puts the keys that callers must send where art-patch accepts them, then becomes the command it was given.
#
# art-patch wants a file that nobody else can read, and secrets are mounted in every way: mode 0444 by Docker Swarm,
# Podman and Kubernetes, with the owner and mode of the host's file by Compose. So the secrets are copied. Without one
# for the server a key is made. It lies in the volume so that a server that comes after this one has the same.
set -eu
umask 077

home=${ART_PATCH_HOME:-/data}
key=$home/api.key

copy() { # SECRET KEY: copies a secret if there is one
    if [ -e "$1" ] && [ ! -r "$1" ]; then
        echo "entrypoint: user $(id -u) cannot read $1; make it readable: it is copied to $2, mode 600" >&2
        exit 2
    fi
    [ -r "$1" ] || return 1
    cat "$1" >"$2.$$" && mv "$2.$$" "$2"
}

copy "${PROXY_KEY_SECRET:-/run/secrets/art_patch_proxy_key}" "$home/proxy.key" || true
if ! copy "${API_KEY_SECRET:-/run/secrets/art_patch_api_key}" "$key" && [ ! -s "$key" ]; then
    # `ln` fails where another container was quicker: all use the first one.
    head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$key.$$"
    ln "$key.$$" "$key" 2>/dev/null || true
    rm -f "$key.$$"
fi
unset home key
unset -f copy
exec "$@"
