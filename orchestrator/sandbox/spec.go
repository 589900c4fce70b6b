package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/oci"
	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/shim/spec"
	"github.com/cubesandbox/cube/snapshotter"
)

// cpuPeriod is the CFS period that a CPU limit is written with, in µs: the kernel's own default.
const cpuPeriod = 100_000

// defaultPath is the PATH of a process whose image sets none.
const defaultPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Process is what a container or an exec runs, where it differs from the image's or the container's.
type Process struct {
	Args []string
	// Env is KEY=VALUE; a bare KEY removes that variable.
	Env  []string
	Cwd  string
	User string
	TTY  bool
}

// Spec asks for a container.
type Spec struct {
	// ID is the container's, "" for a random one.
	ID    string
	Image string
	// Outside is as in PullOptions, should the image not be here.
	Outside bool
	// Entrypoint replaces the image's entrypoint and drops its command; nil keeps both.
	Entrypoint *string
	Process    Process
	// From is a snapshot with whose disk the container begins, "" for the image's. No memory comes from there.
	From string
	// CPUs and Memory (bytes) are the container's limits and, rounded up, its machine's size; Disk (bytes) is its root
	// disk's. 0 = the configured default.
	CPUs        float64
	Memory      int64
	Disk        int64
	Mounts      []Mount
	Annotations map[string]string
	// Labels are containerd's.
	Labels map[string]string
	// Whole gives the container all of its machine: root in it is root of the guest. It has envd in ToolsDir.
	Whole bool
	// Network is what the container reaches and by which ports it is reached; nil: nothing, and by none.
	Network *network.Settings
}

// Mount is a file or directory of the host that the container sees.
type Mount struct {
	Source, Destination string // absolute
	ReadOnly            bool
}

// spec is the mount as an OCI spec has it.
func (m Mount) spec() specs.Mount {
	access := "rw"
	if m.ReadOnly {
		access = "ro"
	}
	return specs.Mount{Destination: m.Destination, Type: "bind", Source: m.Source, Options: []string{"rbind", access}}
}

// hostname is the host name of a container.
func hostname(id string) string {
	const most = 63 // HOST_NAME_MAX is 64 with the NUL
	return id[:min(len(id), most)]
}

// command is what the container runs: docker's rules for entrypoint and command.
func (s Spec) command(img imagespec.ImageConfig) ([]string, error) {
	entry, cmd := img.Entrypoint, img.Cmd
	if s.Entrypoint != nil {
		entry, cmd = nil, nil
		if *s.Entrypoint != "" {
			entry = []string{*s.Entrypoint}
		}
	}
	if len(s.Process.Args) > 0 {
		cmd = s.Process.Args
	}
	args := append(append([]string{}, entry...), cmd...)
	if len(args) == 0 || args[0] == "" {
		return nil, fmt.Errorf("image %s has no command of its own: give one after the image", s.Image)
	}
	return args, nil
}

// options turn the image's configuration and the request into an OCI spec.
func (s Spec) options(config imagespec.ImageConfig) ([]oci.SpecOpts, error) {
	args, err := s.command(config)
	if err != nil {
		return nil, err
	}
	annotations, err := s.annotations()
	if err != nil {
		return nil, err
	}
	env := config.Env
	if len(env) == 0 {
		env = []string{defaultPath}
	}
	opts := []oci.SpecOpts{
		oci.WithDefaultUnixDevices,
		// Programs size themselves by the limits that they read there.
		oci.WithMounts([]specs.Mount{{
			Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup",
			Options: []string{"ro", "nosuid", "noexec", "nodev"},
		}}),
		oci.WithEnv(env),
		oci.WithProcessArgs(args...),
		oci.WithProcessCwd(first(s.Process.Cwd, config.WorkingDir, "/")),
		oci.WithHostname(hostname(s.ID)),
		oci.WithAnnotations(annotations),
	}
	if s.Whole {
		opts = append(opts, whole)
	}
	for _, m := range s.Mounts {
		opts = append(opts, oci.WithMounts([]specs.Mount{m.spec()}))
	}
	if s.Process.TTY {
		opts = append(opts, oci.WithTTY, oci.WithEnv([]string{"TERM=xterm"}))
	}
	opts = append(opts, oci.WithEnv(s.Process.Env))
	if user := first(s.Process.User, config.User); user != "" {
		opts = append(opts, withUser(user))
	}
	if s.CPUs != 0 {
		quota := s.CPUs * cpuPeriod
		if math.IsNaN(quota) || quota < 1000 || quota > math.MaxInt32 { // 1 ms is the kernel's least quota
			return nil, fmt.Errorf("%v is not a number of CPUs: use for example 1 or 0.5", s.CPUs)
		}
		opts = append(opts, oci.WithCPUCFS(int64(quota), cpuPeriod))
	}
	switch {
	case s.Memory < 0:
		return nil, fmt.Errorf("%d bytes of memory is not a size", s.Memory)
	case s.Memory > 0:
		opts = append(opts, oci.WithMemoryLimit(uint64(s.Memory)))
	}
	return opts, nil
}

// annotations are the asked-for ones and how the shim is told of the network.
func (s Spec) annotations() (map[string]string, error) {
	if _, ok := s.Annotations[spec.NetworkKey]; ok {
		return nil, fmt.Errorf("annotation %s is what the network's settings are written into: use those", spec.NetworkKey)
	}
	value := spec.NoNetwork
	if s.Network != nil {
		b, err := json.Marshal(s.Network)
		if err != nil {
			return nil, fmt.Errorf("encode the network's settings: %w", err)
		}
		value = string(b)
	}
	all := map[string]string{spec.NetworkKey: value}
	maps.Copy(all, s.Annotations)
	return all, nil
}

// disk is how the snapshotter is told of the root disk's size.
func (s Spec) disk() []snapshots.Opt {
	if s.Disk == 0 {
		return nil
	}
	return []snapshots.Opt{snapshots.WithLabels(map[string]string{snapshotter.SizeLabel: strconv.FormatInt(s.Disk, 10)})}
}

// withUser sets uid[:gid] as it stands. Names, and the group of a lone uid, are looked up in the image's own passwd and
// group files, for which the fresh disk is mounted read-only on the host: no guest has had it yet.
func withUser(user string) oci.SpecOpts {
	if u, ok := numericUser(user); ok {
		return func(_ context.Context, _ oci.Client, _ *containers.Container, s *oci.Spec) error {
			s.Process.User = u
			return nil
		}
	}
	return func(ctx context.Context, c oci.Client, r *containers.Container, s *oci.Spec) error {
		err := oci.WithUser(user)(ctx, c, r, s)
		if errors.Is(err, oci.ErrNoUsersFound) || errors.Is(err, oci.ErrNoGroupsFound) {
			return fmt.Errorf("user %q isn't in the image", user)
		}
		return err
	}
}

// numericUser parses uid:gid. Root needs no look-up either.
func numericUser(user string) (specs.User, bool) {
	if user == "root" || user == "0" {
		user = "0:0"
	}
	uid, gid, ok := strings.Cut(user, ":")
	u, uerr := strconv.ParseUint(uid, 10, 31)
	g, gerr := strconv.ParseUint(gid, 10, 31)
	if !ok || uerr != nil || gerr != nil {
		return specs.User{}, false
	}
	return specs.User{UID: uint32(u), GID: uint32(g), AdditionalGids: []uint32{uint32(g)}}, true
}

// execProcess is the container's process with what the exec wants otherwise.
func execProcess(base *specs.Process, p Process) (*specs.Process, error) {
	if len(p.Args) == 0 {
		return nil, errors.New("no command given")
	}
	out := *base
	out.Args, out.CommandLine = p.Args, ""
	out.Terminal = p.TTY
	out.ConsoleSize = nil
	if p.Cwd != "" {
		out.Cwd = p.Cwd
	}
	spec := oci.Spec{Process: &out}
	env := p.Env
	if p.TTY && !base.Terminal {
		env = append([]string{"TERM=xterm"}, env...)
	}
	if err := oci.WithEnv(env)(context.Background(), nil, nil, &spec); err != nil {
		return nil, err
	}
	if p.User != "" {
		user, ok := numericUser(p.User)
		if !ok {
			// The files with the names are on a disk that the guest writes, which the host doesn't mount.
			return nil, fmt.Errorf("user %q: only numbers (uid:gid) can be used in a running container", p.User)
		}
		out.User = user
	}
	return &out, nil
}

func first(values ...string) string {
	for _, v := range values {
		if v != "" {
			return v
		}
	}
	return ""
}
