#!/usr/bin/env bash
# Makes sure that programs are on the PATH; on Debian as root it installs their packages:
# install_packages.sh "PROGRAM ..." "PACKAGE ..."
set -euo pipefail
missing=""
for program in $1; do
  command -v "$program" >/dev/null || missing+=" $program"
done
if [ -z "$missing" ]; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "error: not on the PATH:$missing; on Debian or Ubuntu: sudo apt-get install $2" >&2
  exit 1
fi
# Tests run side by side, and apt-get waits for another apt-get only at its last step.
exec 9>/tmp/locos-install.lock
flock 9
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
# shellcheck disable=SC2086
apt-get -qq -o DPkg::Lock::Timeout=300 install -y --no-install-recommends $2 >/dev/null
