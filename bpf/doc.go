// Package bpf is the datapath between microVMs and the host's network: programs on taps and on one gateway device (dp),
// and what loads and steers them. Its parts:
//
//	dp      the programs, in C: identity by tap, checks of every frame, policy, flows, limits, the rewrite of addresses
//	policy  the compiler from rules to rows of the policy map
//
// A tap is closed from when its programs are attached until a sandbox is added for it, and again once it is removed; a
// sandbox without a policy reaches nothing. What is in force stays so without any process: programs, links and maps are
// pinned on a BPF file system of the datapath's own. One process at a time opens it and brings its programs, to a hook that has
// others without a gap, and finds everything as it was; any number of others use what is there then.
//
// The package knows nothing of machines, of CNI or of the host's rules for what leaves the gateway device.
package bpf
