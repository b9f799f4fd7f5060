#!/usr/bin/env bash
# Installs Ceph's object gateway from Debian's packages: the S3 server of tests/workflow/test_s3.py.
set -euo pipefail
command -v radosgw ceph-mon ceph-osd > /dev/null && exit
test "$(id -u)" = 0 || { echo "error: run as root, or install radosgw, ceph-mon and ceph-osd" >&2; exit 1; }
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq --no-install-recommends -y radosgw ceph-mon ceph-osd > /dev/null
