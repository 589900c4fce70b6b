// Package plugin is the CNI plugin cube-cni: package network behind the CNI specification, version 1.1. It does its work by
// itself; that the daemon runs makes ADD faster, as there are taps ready then, and is needed only for ports of the host that
// lead to the container, which the daemon serves.
//
// Its configuration, beside what the specification has:
//
//	{
//	  "type": "cube-cni",
//	  "capabilities": {"bandwidth": true, "portMappings": true},
//	  "cubeConfig": "/etc/cube/config.toml",
//	  "policy": {"default": "deny", "allow": [{"to": "192.0.2.0/24", "ports": ["443"], "protocol": "tcp"}], "deny": []}
//	}
//
// Without a policy nothing can be reached. Of rules that a packet matches one that allows it beats one that denies it.
package plugin
