#!/usr/bin/env bash
# Starts a Ceph cluster of one monitor, one memory-backed OSD and one S3 gateway on 127.0.0.1, and makes
# a user: start_s3.sh FOLDER MONITOR_PORT S3_PORT ACCESS_KEY SECRET_KEY. FOLDER/run/*.pid name the processes.
set -euo pipefail
folder=$1 monitor=v1:127.0.0.1:$2 port=$3
fsid=$(cat /proc/sys/kernel/random/uuid)
osd=$(cat /proc/sys/kernel/random/uuid)
mkdir -p "$folder"/{mon,osd,rgw,run}
cat > "$folder/ceph.conf" << CONF
[global]
fsid = $fsid
mon host = $monitor
ms bind msgr2 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
mon data = $folder/mon
osd data = $folder/osd
rgw data = $folder/rgw
run dir = $folder/run
admin socket = $folder/run/\$name.asok
pid file = $folder/run/\$name.pid
log file = $folder/\$name.log
crash dir = $folder
osd objectstore = memstore
memstore device bytes = 1073741824
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
mon allow pool size one = true
rgw frontends = beast endpoint=127.0.0.1:$port
CONF
export CEPH_CONF=$folder/ceph.conf
monmaptool --create --addv a "$monitor" --fsid "$fsid" "$folder/monmap" > /dev/null
ceph-mon --mkfs -i a --monmap "$folder/monmap"
ceph-mon -i a
ceph osd new "$osd" > /dev/null
ceph-osd --mkfs -i 0 --osd-uuid "$osd"
ceph-osd -i 0
radosgw -n client.rgw
timeout 120 radosgw-admin user create --uid=locos --display-name=locos --access-key="$4" --secret-key="$5" > /dev/null
