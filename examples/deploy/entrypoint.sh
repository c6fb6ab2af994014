#!/bin/sh
# Puts the key that callers must send where art-patch accepts it, then becomes the command it was given.
#
# art-patch wants a file that nobody else can read, and secrets are mounted in every way: mode 0444 by Docker Swarm,
# Podman and Kubernetes, with the owner and mode of the host's file by Compose. So the secret is copied. Without one a
# key is made. It lies in the volume so that a server that comes after this one has the same.
set -eu
umask 077

secret=${API_KEY_SECRET:-/run/secrets/art_patch_api_key}
key=${ART_PATCH_HOME:-/data}/api.key

if [ -e "$secret" ] && [ ! -r "$secret" ]; then
    echo "entrypoint: user $(id -u) cannot read $secret; make it readable: it is copied to $key, mode 600" >&2
    exit 2
fi
if [ -r "$secret" ]; then
    cat "$secret" >"$key.$$" && mv "$key.$$" "$key"
elif [ ! -s "$key" ]; then
    # `ln` fails where another container was quicker: all use the first one.
    head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$key.$$"
    ln "$key.$$" "$key" 2>/dev/null || true
    rm -f "$key.$$"
fi
unset secret key
exec "$@"
