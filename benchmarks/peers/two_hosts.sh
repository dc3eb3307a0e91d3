#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A program on two hosts: network namespaces of this machine, each with its own /dev/shm and process
# ids, so that nothing but their link joins them. On each it runs twice, as a server and as a
# trainer; what trainer 0 prints is printed. Needs root and iproute2.
#
# The program finds ROLE (server or trainer), HOST (0 or 1), IP_CONFIG (a file with the addresses of
# both servers), FOLDER (for what both hosts share), and what torch.distributed and its RPC want.
# RATE, in Mbit/s, shapes the link, both ways.
# usage: [THREADS=1] [RATE=1000] two_hosts.sh PROGRAM ARGUMENTS...
set -u
FOLDER=$(mktemp -d)
LINK=gsb$$
cleanup() {
  ip netns del "${LINK}-0" 2>/dev/null
  ip netns del "${LINK}-1" 2>/dev/null
  rm -rf "$FOLDER"
}
trap cleanup EXIT
ip netns add "$LINK-0" && ip netns add "$LINK-1" || exit 1
ip link add "${LINK}a" type veth peer name "${LINK}b" || exit 1
for i in 0 1; do
  [ $i = 0 ] && END=${LINK}a || END=${LINK}b
  ip link set "$END" netns "$LINK-$i"
  ip -n "$LINK-$i" link set "$END" name host
  ip -n "$LINK-$i" addr add "10.77.0.$((i + 1))/24" dev host
  ip -n "$LINK-$i" link set dev host up
  ip -n "$LINK-$i" link set dev lo up
  [ -z "${RATE:-}" ] && continue
  ip netns exec "$LINK-$i" tc qdisc add dev host root tbf rate "${RATE}mbit" burst 256kb \
    latency 100ms || exit 1
done
printf '10.77.0.1 30050\n10.77.0.2 30050\n' >"$FOLDER/ip.txt"
export IP_CONFIG=$FOLDER/ip.txt OMP_NUM_THREADS=${THREADS:-1} WORLD_SIZE=2 LOCAL_RANK=0 FOLDER
export MASTER_ADDR=10.77.0.1 MASTER_PORT=29555 GLOO_SOCKET_IFNAME=host TP_SOCKET_IFNAME=host
host() {
  HOST=$1 RANK=$1 ip netns exec "$LINK-$1" unshare --mount --pid --fork --kill-child bash -c '
    mount -t proc proc /proc
    mount -t tmpfs tmpfs /dev/shm
    ROLE=server "$@" >"$FOLDER/server$HOST.log" 2>&1 &
    SERVER=$!
    ROLE=trainer timeout 300 "$@" >"$FOLDER/trainer$HOST.log" 2>&1
    sleep 1
    kill $SERVER 2>/dev/null' host "${@:2}"
}
host 0 "$@" & FIRST=$!
host 1 "$@" & SECOND=$!
wait $FIRST
wait $SECOND
grep -h '^{' "$FOLDER/trainer0.log" || { tail -n 20 "$FOLDER"/*.log >&2; exit 1; }
