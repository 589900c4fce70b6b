package sandbox

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"github.com/cubesandbox/cube/shim/sandbox/cri"
	"github.com/cubesandbox/cube/shim/spec"
)

// hostResolvConf is what a pod that says nothing of its DNS has, as it would have with containerd's own sandboxes.
const hostResolvConf = "/etc/resolv.conf"

// maxResolvConf bounds it; glibc reads a few lines of it.
const maxResolvConf = 64 << 10

// common is what containerd makes itself for the containers of a pod that has a pause container, and leaves to the shim
// here. What a kubelet makes, its mounts bring.
func common(c *cri.PodSandboxConfig, hostname string) (spec.Common, error) {
	resolv, err := resolvConf(c.GetDnsConfig())
	if err != nil {
		return spec.Common{}, err
	}
	files := map[string][]byte{
		"/etc/hostname": []byte(hostname + "\n"),
		"/etc/hosts":    fmt.Appendf(nil, "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t%s\n", hostname),
	}
	if resolv != nil {
		files["/etc/resolv.conf"] = resolv
	}
	return spec.Common{Files: files, Sysctls: c.GetLinux().GetSysctls()}, nil
}

func resolvConf(d *cri.DNSConfig) ([]byte, error) {
	if d == nil {
		f, err := os.Open(hostResolvConf)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("the host's DNS configuration: %w", err)
		}
		defer f.Close()
		return io.ReadAll(io.LimitReader(f, maxResolvConf))
	}
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
	return []byte(b.String()), nil
}
