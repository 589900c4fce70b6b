package stack

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"github.com/pelletier/go-toml/v2"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/snapshotter"
)

const (
	// configVersion is the configuration format of containerd 2.4.
	configVersion = 4
	// maxShimSocketDir is the longest directory that containerd accepts for the shims' sockets, in bytes
	// (containerd, core/runtime/v2/socket_linux.go).
	maxShimSocketDir = 42
	// differName is what the diff service is called in containerd. It shares the snapshotter's socket but can't share
	// its name, which is unique among proxy plugins of all kinds.
	differName = snapshotter.Name + "-diff"
)

// table is a TOML table. Its keys are written in alphabetical order.
type table = map[string]any

// containerdConfig is the private containerd's whole configuration.
func containerdConfig(cfg *config.Config) ([]byte, error) {
	state := func(elem ...string) string {
		return filepath.Join(append([]string{containerdRoot(cfg)}, elem...)...)
	}
	c := cubePlugins(cfg)
	c["version"] = configVersion
	c["root"] = state()
	c["state"] = ContainerdState(cfg)
	c["debug"] = table{"level": cfg.LogLevel}
	c["disabled_plugins"] = []string{
		// This containerd serves no kubelet, and CRI's streaming server and CNI would want ports and files of the host.
		"io.containerd.grpc.v1.cri",
		"io.containerd.cri.v1.images",
		"io.containerd.cri.v1.runtime",
		"io.containerd.podsandbox.controller.v1.podsandbox",
		// NRI plugins of the host aren't meant for this containerd.
		"io.containerd.nri.v1.nri",
	}
	c["required_plugins"] = []string{"io.containerd.snapshotter.v1." + snapshotter.Name, "io.containerd.differ.v1." + differName}
	c["timeouts"] = table{
		// containerd's own defaults, scaled for this host.
		"io.containerd.timeout.shim.cleanup":  cfg.Timeout(5 * time.Second).String(),
		"io.containerd.timeout.shim.load":     cfg.Timeout(5 * time.Second).String(),
		"io.containerd.timeout.shim.shutdown": cfg.Timeout(3 * time.Second).String(),
		"io.containerd.timeout.task.state":    cfg.Timeout(2 * time.Second).String(),
	}
	plugins := c["plugins"].(table)
	plugins["io.containerd.server.v1.grpc"] = table{"address": cfg.ContainerdSocket()}
	plugins["io.containerd.server.v1.ttrpc"] = table{"address": cfg.ContainerdSocket() + ".ttrpc"}
	plugins["io.containerd.internal.v1.opt"] = table{"path": state("opt")}
	plugins["io.containerd.image-verifier.v1.bindir"] = table{"bin_dir": state("image-verifier")}
	if dir := ShimSocketDir(cfg); dir != "" {
		plugins["io.containerd.shim.v1.manager"].(table)["socket_dir"] = dir
	}
	return marshal(c)
}

// Snippet is what an existing containerd's configuration needs for this stack.
func Snippet(cfg *config.Config) ([]byte, error) { return marshal(cubePlugins(cfg)) }

// cubePlugins is the part of containerd's configuration that is about Cube, the same for a private and a foreign one.
func cubePlugins(cfg *config.Config) table {
	platform := "linux/" + runtime.GOARCH
	return table{
		"proxy_plugins": table{
			snapshotter.Name: table{"type": "snapshot", "address": cfg.SnapshotterSocket()},
			differName:       table{"type": "diff", "address": cfg.SnapshotterSocket()},
		},
		"plugins": table{
			"io.containerd.service.v1.diff-service": table{"default": []string{differName, "walking"}},
			"io.containerd.transfer.v1.local": table{"unpack_config": []table{
				{"platform": platform, "snapshotter": "overlayfs", "differ": "walking", "optional": true},
				{"platform": platform, "snapshotter": snapshotter.Name, "differ": "walking"},
			}},
			"io.containerd.shim.v1.manager": table{"env": shimEnv(cfg)},
		},
	}
}

// shimEnv is what every shim must know; containerd starts them, with the environment of its own.
func shimEnv(cfg *config.Config) []string {
	env := []string{"CUBE_TIMEOUT_SCALE=" + strconv.FormatFloat(cfg.TimeoutScale, 'g', -1, 64)}
	if file := os.Getenv(config.FileEnv); file != "" {
		env = append(env, config.FileEnv+"="+file)
	}
	return env
}

func marshal(t table) ([]byte, error) {
	b, err := toml.Marshal(t)
	if err != nil {
		return nil, fmt.Errorf("write containerd's configuration: %w", err)
	}
	return b, nil
}

// containerdRoot is the private containerd's root directory: what outlives the host's restart.
func containerdRoot(cfg *config.Config) string { return filepath.Join(cfg.StateDir, "containerd") }

// ContainerdState is the private containerd's state directory: its bundles are below it.
func ContainerdState(cfg *config.Config) string { return filepath.Dir(cfg.BundleDir()) }

// containerdConfigPath is the private containerd's configuration file. Its path on a command line is how that
// containerd is recognised.
func containerdConfigPath(cfg *config.Config) string {
	return filepath.Join(cfg.RunDir, "containerd.toml")
}

// ShimSocketDir is where the private containerd's shims listen; "" where its path would be too long for a socket, and they
// are among all others'.
func ShimSocketDir(cfg *config.Config) string {
	if dir := filepath.Join(cfg.RunDir, "shim"); len(dir) <= maxShimSocketDir {
		return dir
	}
	return ""
}
