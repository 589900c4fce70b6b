package sandbox

import (
	"fmt"
	"strings"

	"github.com/cubesandbox/cube/shim/sandbox/cri"
	"github.com/cubesandbox/cube/shim/spec"
)

// common is what containerd makes itself for the containers of a pod that has a pause container, and leaves to the shim
// here. What a kubelet makes, its mounts bring. A pod that says nothing of its DNS has the guest's own resolv.conf, where the
// guest has a network: the host's name servers may be on the host's loopback, and are none of a sandbox's.
func common(c *cri.PodSandboxConfig, hostname string) spec.Common {
	files := map[string][]byte{
		"/etc/hostname": []byte(hostname + "\n"),
		"/etc/hosts":    fmt.Appendf(nil, "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t%s\n", hostname),
	}
	if resolv := resolvConf(c.GetDnsConfig()); resolv != "" {
		files["/etc/resolv.conf"] = []byte(resolv)
	}
	return spec.Common{Files: files, Sysctls: c.GetLinux().GetSysctls()}
}

// resolvConf is "" for a configuration that says nothing.
func resolvConf(d *cri.DNSConfig) string {
	var b strings.Builder
	line := func(key string, values ...string) {
		if len(values) > 0 {
			fmt.Fprintf(&b, "%s %s\n", key, strings.Join(values, " "))
		}
	}
	line("search", d.GetSearches()...)
	for _, s := range d.GetServers() {
		line("nameserver", s)
	}
	line("options", d.GetOptions()...)
	return b.String()
}
