// Package shim is the map of the containerd shim v2 of Cube, runtime name io.cube.v2. Its parts:
//
//	manager   what the binary does when containerd calls it: start, delete, info
//	server    the server process: the pod and its services, as plugins
//	task      the ttrpc Task v3 service: decodes requests, encodes answers and errors
//	sandbox   the ttrpc Sandbox v1 service: a pod that has its machine before its containers
//	snapshots the ttrpc service by which the pod is saved and put back, and its client; api is its protocol
//	saved     what is written down of a pod that is saved, and of a checkpoint
//	pod       one machine and the containers in it: create, start, exec, exits, delete, and the death of the machine
//	guest     the agent in the machine: the multiplexed channel and its calls
//	spec      the OCI spec of the host turned into what the machine gets
//	rootfs    root file system mounts turned into disks
//	share     bind mounts of the host's files, served to the guest by a jailed helper
//	stdio     containerd's fifos, log files and log binaries, and the copying between them and the guest's streams
//	attach    a pod's place in the host's network: the machine's tap, and what the guest is told
//	hooks     OCI hooks that run on the host
//	record    what a shim leaves in its pod directory and in bundles, so that whoever comes later can undo it
//
// The guest owns what a container is (namespaces, cgroups, reaping); the host owns the machine, disks, fifos and events.
// The shim trusts containerd and nothing that comes from the guest.
package shim
