#!/bin/sh
# Installs what tests/workflow/test_slurm.py starts: the daemons and clients of Slurm, and munge. For Debian and
# Ubuntu; run it as root. It starts nothing: the test starts its own cluster in a temporary folder.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends munge slurm-client slurmctld slurmd
