#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Two DistDGL machines as two network namespaces of this one, each with its own /dev/shm: a server
# and a trainer each. Needs root and iproute2.
# usage: distdgl.sh PYTHON PARTS.json HIDDEN EPOCHS
set -u
PYTHON=$1 PARTS=$2 HIDDEN=$3 EPOCHS=$4
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
WORK=$(mktemp -d)
cleanup() {
  ip netns del gsb0 2>/dev/null
  ip netns del gsb1 2>/dev/null
  rm -rf "$WORK"
}
trap cleanup EXIT
ip netns add gsb0 && ip netns add gsb1 || exit 1
ip link add gsb0e type veth peer name gsb1e
for i in 0 1; do
  ip link set "gsb${i}e" netns "gsb$i"
  ip -n "gsb$i" addr add "10.77.0.$((i + 1))/24" dev "gsb${i}e"
  ip -n "gsb$i" link set "gsb${i}e" up
  ip -n "gsb$i" link set lo up
done
printf '10.77.0.1 30050\n10.77.0.2 30050\n' >"$WORK/ip.txt"
export DGL_DIST_MODE=distributed DGL_NUM_SAMPLER=0 DGL_NUM_CLIENT=2 DGL_NUM_SERVER=1
export DGL_CONF_PATH=$PARTS DGL_IP_CONFIG=$WORK/ip.txt DGL_GRAPH_FORMAT=csc DGL_KEEP_ALIVE=0
export OMP_NUM_THREADS=1 DGLBACKEND=pytorch HERE WORK PYTHON PARTS HIDDEN EPOCHS
machine() {
  NUMBER=$1 ip netns exec "gsb$1" unshare -m bash -c '
    mount -t tmpfs tmpfs /dev/shm
    DGL_ROLE=server DGL_SERVER_ID=$NUMBER "$PYTHON" "$HERE/distdgl_sampled.py" \
      "$WORK/ip.txt" "$PARTS" "$HIDDEN" "$EPOCHS" >"$WORK/server$NUMBER.log" 2>&1 &
    SERVER=$!
    DGL_ROLE=client GLOO_SOCKET_IFNAME=gsb${NUMBER}e RANK=$NUMBER WORLD_SIZE=2 LOCAL_RANK=0 \
      MASTER_ADDR=10.77.0.1 MASTER_PORT=29555 timeout 600 "$PYTHON" "$HERE/distdgl_sampled.py" \
      "$WORK/ip.txt" "$PARTS" "$HIDDEN" "$EPOCHS" >"$WORK/client$NUMBER.log" 2>&1
    sleep 2
    kill $SERVER 2>/dev/null'
}
machine 0 & FIRST=$!
machine 1 & SECOND=$!
wait $FIRST
wait $SECOND
grep -h '^{' "$WORK/client0.log" || { tail -n 20 "$WORK"/*.log >&2; exit 1; }
