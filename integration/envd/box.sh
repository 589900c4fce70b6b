#!/bin/sh
# The first process of a box, in namespaces of its own: makes a machine of it that has a user "user", and becomes its init.
#   box.sh CUBE-ENVD DIR INIT-ARGUMENT…
set -eu
if [ "${OWN_CGROUP:-}" = yes ]; then
	# The namespace's root is the group that this process is in.
	OWN_CGROUP=entered exec unshare --cgroup -- "$0" "$@"
fi
binary=$1 dir=$2
shift 2
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
cp "$binary" /run/cube-envd
cp -a /etc /run/etc
cp "$dir/passwd" "$dir/group" /run/etc
rm -f /run/etc/hosts
mount --bind /run/etc /etc
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /root
mount -t tmpfs tmpfs /home
if [ -n "${OWN_CGROUP:-}" ]; then
	mount -t cgroup2 cgroup2 /sys/fs/cgroup
fi
mkdir /home/user
chown 4321:4321 /home/user
chmod 1777 /tmp
ip link set lo up
ip link add eth0 type veth peer name outside
ip address add 192.0.2.2/24 dev eth0
ip link set outside up
ip link set eth0 up
# The clock is the host's.
exec setpriv --bounding-set=-sys_time -- /run/cube-envd init "$@"
