#!/bin/sh
# Installs Chromium and its driver for tests/browser where that is possible (root and apt). Says what it does, and always
# succeeds: without a browser those tests skip themselves and name the reason.
say() { echo "tests/browser: $*"; }

if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
    say "chromium and chromedriver are here"
elif [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "chromium or chromedriver is missing; install the Debian packages chromium and chromium-driver to run these tests"
else
    say "apt-get install chromium chromium-driver"
    export DEBIAN_FRONTEND=noninteractive
    log=$(mktemp)
    install() { timeout 300 apt-get install --yes --no-install-recommends chromium chromium-driver >"$log" 2>&1; }
    if install || { timeout 120 apt-get update >"$log" 2>&1 && install; }; then
        say "installed"
    else
        say "could not be installed ($(tail -n 1 "$log")); these tests will be skipped"
    fi
    rm -f "$log"
fi
exit 0
