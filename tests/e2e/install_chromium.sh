#!/usr/bin/env bash
# Makes sure that Chromium and its driver are there; on Debian as root it installs them.
set -euo pipefail
if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "error: the tests of the pages need Chromium and its driver on the PATH; on Debian or Ubuntu:" \
    "sudo apt-get install chromium chromium-driver" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq -o DPkg::Lock::Timeout=300 install -y --no-install-recommends chromium chromium-driver >/dev/null
