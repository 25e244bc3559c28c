#!/bin/sh
# Installs the Debian packages that some tests need, where that is possible (root and apt): a browser for tests/browser, and
# a compiler for tests/gpu. Says what it does, and always succeeds: without them those tests skip and name the reason.
say() { echo "tests: $*"; }

packages=""
command -v chromium >/dev/null || packages="$packages chromium"
command -v chromedriver >/dev/null || packages="$packages chromium-driver"
command -v c++ >/dev/null || packages="$packages g++"

if [ -z "$packages" ]; then
    say "a browser and a compiler are here"
elif [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "to run all tests, install the Debian packages$packages"
else
    say "apt-get install$packages"
    export DEBIAN_FRONTEND=noninteractive
    log=$(mktemp)
    # $packages is split into words on purpose.
    install() { timeout 300 apt-get install --yes --no-install-recommends $packages >"$log" 2>&1; }
    if install || { timeout 120 apt-get update >"$log" 2>&1 && install; }; then
        say "installed"
    else
        say "could not be installed ($(tail -n 1 "$log")); the tests that need them will be skipped"
    fi
    rm -f "$log"
fi
exit 0
