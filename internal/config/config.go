// Package config is the one configuration of every Cube binary on a host, and the one place where paths are made.
package config

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/docker/go-units"
	"github.com/pelletier/go-toml/v2"
)

// DefaultFile is read where neither a flag nor CUBE_CONFIG names another; it need not exist.
const DefaultFile = "/etc/cube/config.toml"

// FileEnv names the configuration file for binaries that containerd starts (the shim). `cube up` sets it for its
// private containerd.
const FileEnv = "CUBE_CONFIG"

// Config is the whole configuration. Sizes are human-readable ("256MiB"), times are Go durations ("2m").
type Config struct {
	// StateDir survives a reboot: images, snapshots, base snapshots, artefacts.
	StateDir string `toml:"state_dir"`
	// RunDir doesn't: sockets, bundles, per-VM state. At most 60 bytes, since socket paths are limited to 108.
	RunDir string `toml:"run_dir"`
	// BinDir holds containerd, ctr, runc, the shim, cube-jail and cube-share. Default: where the running binary is.
	BinDir string `toml:"bin_dir"`
	// Artefacts holds QEMU and the guest image by digest. Default: StateDir/artefacts.
	Artefacts string `toml:"artefacts"`
	// ReadyTimeout bounds how long `cube up` waits for each part of the stack.
	ReadyTimeout Duration `toml:"ready_timeout"`
	// TimeoutScale multiplies every deadline; CUBE_TIMEOUT_SCALE overrides it. For slow or loaded hosts.
	TimeoutScale float64 `toml:"timeout_scale"`
	// LogLevel is debug, info, warn or error.
	LogLevel string `toml:"log_level"`

	Containerd Containerd `toml:"containerd"`
	Store      Store      `toml:"store"`
	VM         VM         `toml:"vm"`
	Logs       Logs       `toml:"logs"`
	Audit      Audit      `toml:"audit"`
	Retention  Retention  `toml:"retention"`
	Network    Network    `toml:"network"`
	API        API        `toml:"api"`
	Pool       Pool       `toml:"pool"`
	Proxy      Proxy      `toml:"proxy"`
	Templates  Templates  `toml:"templates"`
	Admission  Admission  `toml:"admission"`
	Limits     Limits     `toml:"limits"`
}

// Containerd says which containerd is used.
type Containerd struct {
	// Address of an existing containerd (≥ 2.3) whose configuration has the cube snapshotter; "" = a private one.
	Address string `toml:"address"`
	// Namespace of the containers that the cube command makes.
	Namespace string `toml:"namespace"`
}

// Store is where the snapshotter keeps images.
type Store struct {
	// Size of the loop-mounted XFS image that is made where StateDir can't reflink. Fully allocated. 0 = none: a plain
	// directory, where every snapshot is a full copy.
	Size Size `toml:"size"`
	// DiskSize is a root disk's size where the image or snapshot has no label of its own.
	DiskSize Size `toml:"disk_size"`
	// HighWatermark is how full the store may be, in percent, for anything to be made in it; what is only a cache is removed
	// before, least recently used out first, until the store is no fuller than LowWatermark.
	HighWatermark int `toml:"high_watermark"`
	LowWatermark  int `toml:"low_watermark"`
}

// VM is how machines are made.
type VM struct {
	// Accelerator is auto, kvm or tcg. auto proves that KVM boots the guest, once per boot of the host.
	Accelerator string `toml:"accelerator"`
	// VCPUs and Memory are a machine's where the container asks for nothing.
	VCPUs  int  `toml:"vcpus"`
	Memory Size `toml:"memory"`
	// MaxVCPUs and MaxMemory are the most that a container may ask for. Default: the host's.
	MaxVCPUs  int  `toml:"max_vcpus"`
	MaxMemory Size `toml:"max_memory"`
	// UIDBase and UIDCount are the host uids that machines run under, one each.
	UIDBase  uint32 `toml:"uid_base"`
	UIDCount uint32 `toml:"uid_count"`
	// BaseSnapshots is how many base snapshots are kept, least recently used out first.
	BaseSnapshots int `toml:"base_snapshots"`
}

// Logs bounds what is kept of a detached container's output: MaxFiles files of at most MaxSize each.
type Logs struct {
	MaxSize  Size `toml:"max_size"`
	MaxFiles int  `toml:"max_files"`
}

// Default is the configuration of a host without a file.
func Default() *Config {
	return &Config{
		StateDir:     "/var/lib/cube",
		RunDir:       "/run/cube",
		ReadyTimeout: Duration(2 * time.Minute),
		TimeoutScale: 1,
		LogLevel:     "info",
		Containerd:   Containerd{Namespace: "default"},
		Store:        Store{Size: 16 * units.GiB, DiskSize: 10 * units.GiB, HighWatermark: 95, LowWatermark: 85},
		VM: VM{
			Accelerator:   "auto",
			VCPUs:         1,
			Memory:        256 * units.MiB,
			UIDBase:       1 << 20,
			UIDCount:      1 << 16,
			BaseSnapshots: 8,
		},
		Logs:      Logs{MaxSize: 10 * units.MiB, MaxFiles: 3},
		Audit:     Audit{MaxSize: 64 * units.MiB, MaxFiles: 10},
		Network:   defaultNetwork(),
		API:       defaultAPI(),
		Pool:      Pool{MaxPerTemplate: 4},
		Proxy:     defaultProxy(),
		Admission: defaultAdmission(),
		Limits:    defaultLimits(),
		Templates: defaultTemplates(),
	}
}

// Load reads the configuration. file "" means $CUBE_CONFIG, then DefaultFile, which alone may be missing. An unknown
// key, a value out of range or a broken file is an error that names it.
func Load(file string) (*Config, error) {
	c := Default()
	mayMiss := false
	if file == "" {
		file = os.Getenv(FileEnv)
	}
	if file == "" {
		file, mayMiss = DefaultFile, true
	}
	b, err := os.ReadFile(file)
	switch {
	case mayMiss && errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, fmt.Errorf("read configuration: %w", err)
	default:
		if err := c.decode(b); err != nil {
			return nil, fmt.Errorf("configuration %s: %w", file, err)
		}
	}
	if s := os.Getenv("CUBE_TIMEOUT_SCALE"); s != "" {
		f, err := strconv.ParseFloat(s, 64)
		if err != nil {
			return nil, fmt.Errorf("CUBE_TIMEOUT_SCALE=%q is not a number", s)
		}
		c.TimeoutScale = f
	}
	if err := c.complete(); err != nil {
		return nil, fmt.Errorf("configuration %s: %w", file, err)
	}
	return c, nil
}

func (c *Config) decode(b []byte) error {
	d := toml.NewDecoder(bytes.NewReader(b)).DisallowUnknownFields()
	err := d.Decode(c)
	var unknown *toml.StrictMissingError
	var syntax *toml.DecodeError
	switch {
	case errors.As(err, &unknown) && len(unknown.Errors) > 0:
		row, _ := unknown.Errors[0].Position()
		return fmt.Errorf("line %d: unknown key %v", row, unknown.Errors[0].Key())
	case errors.As(err, &syntax):
		row, _ := syntax.Position()
		return fmt.Errorf("line %d: %v", row, syntax)
	}
	return err
}

// complete fills in what depends on other values and checks the rest.
func (c *Config) complete() error {
	if c.BinDir == "" {
		self, err := os.Executable()
		if err != nil {
			return err
		}
		c.BinDir = filepath.Dir(self)
	}
	if c.Artefacts == "" {
		c.Artefacts = filepath.Join(c.StateDir, "artefacts")
	}
	for key, dir := range map[string]string{"state_dir": c.StateDir, "run_dir": c.RunDir, "bin_dir": c.BinDir, "artefacts": c.Artefacts} {
		if !filepath.IsAbs(dir) {
			return fmt.Errorf("%s = %q must be an absolute path", key, dir)
		}
	}
	switch {
	case len(c.RunDir) > 60:
		return fmt.Errorf("run_dir = %q is longer than 60 bytes; socket paths below it would not fit", c.RunDir)
	case c.TimeoutScale < 0.1 || c.TimeoutScale > 1000:
		return fmt.Errorf("timeout_scale = %v must be between 0.1 and 1000", c.TimeoutScale)
	case c.ReadyTimeout <= 0:
		return fmt.Errorf("ready_timeout must be positive")
	case c.Containerd.Namespace == "":
		return fmt.Errorf("containerd.namespace must not be empty")
	case c.VM.Accelerator != "auto" && c.VM.Accelerator != "kvm" && c.VM.Accelerator != "tcg":
		return fmt.Errorf("vm.accelerator = %q must be auto, kvm or tcg", c.VM.Accelerator)
	case c.VM.UIDBase < 1000 || c.VM.UIDCount < 1 || c.VM.UIDBase+c.VM.UIDCount < c.VM.UIDBase:
		return fmt.Errorf("vm.uid_base = %d with vm.uid_count = %d is not a range of unprivileged uids", c.VM.UIDBase, c.VM.UIDCount)
	case c.Store.DiskSize < 64*units.MiB:
		return fmt.Errorf("store.disk_size = %s must be at least 64MiB", c.Store.DiskSize)
	case c.Store.LowWatermark < 1 || c.Store.LowWatermark > c.Store.HighWatermark || c.Store.HighWatermark > 100:
		return fmt.Errorf("store.low_watermark = %d and store.high_watermark = %d must be between 1 and 100, the low one first", c.Store.LowWatermark, c.Store.HighWatermark)
	case c.VM.VCPUs < 1 || c.VM.Memory < 128*units.MiB || c.VM.BaseSnapshots < 1:
		return fmt.Errorf("vm.vcpus must be at least 1, vm.memory 128MiB, vm.base_snapshots 1")
	case c.Logs.MaxSize < 64*units.KiB:
		return fmt.Errorf("logs.max_size = %s must be at least 64KiB", c.Logs.MaxSize)
	case c.Logs.MaxFiles < 1 || c.Logs.MaxFiles > 1000:
		return fmt.Errorf("logs.max_files = %d must be between 1 and 1000", c.Logs.MaxFiles)
	}
	if err := c.Audit.validate(); err != nil {
		return err
	}
	if err := c.Pool.validate(); err != nil {
		return err
	}
	if err := c.Retention.Validate(); err != nil {
		return err
	}
	if err := c.API.validate(); err != nil {
		return err
	}
	if err := c.Proxy.validate(); err != nil {
		return err
	}
	if err := c.Templates.validate(); err != nil {
		return err
	}
	if err := c.Admission.validate(); err != nil {
		return err
	}
	if err := c.Limits.validate(); err != nil {
		return err
	}
	return c.Network.validate()
}

// Timeout scales a deadline for this host.
func (c *Config) Timeout(d time.Duration) time.Duration {
	return time.Duration(float64(d) * c.TimeoutScale)
}

// Bin is the path of one of Cube's binaries or tools.
func (c *Config) Bin(name string) string { return filepath.Join(c.BinDir, name) }

// StoreDir is where images, snapshots and base snapshots are: one file system, with reflinks wherever possible.
func (c *Config) StoreDir() string { return filepath.Join(c.StateDir, "store") }

// StoreImage is the loop-mounted XFS image behind StoreDir, where there is one.
func (c *Config) StoreImage() string { return filepath.Join(c.StateDir, "store.xfs") }

// SnapshotterDir is the snapshotter's root.
func (c *Config) SnapshotterDir() string { return filepath.Join(c.StoreDir(), "snapshotter") }

// BaseDir holds base VM snapshots.
func (c *Config) BaseDir() string { return filepath.Join(c.StoreDir(), "base") }

// SnapshotDir holds the snapshots of running machines.
func (c *Config) SnapshotDir() string { return filepath.Join(c.StoreDir(), "snapshots") }

// DiskDir holds one directory per machine that was made from a snapshot, with the images of its disks.
func (c *Config) DiskDir() string { return filepath.Join(c.StoreDir(), "disks") }

// PausedDir holds a checkpoint for each container that is paused to disk, by namespace and id.
func (c *Config) PausedDir() string { return filepath.Join(c.StateDir, "paused") }

// DatabaseFile is what the control plane remembers of sandboxes, keys and templates.
func (c *Config) DatabaseFile() string { return filepath.Join(c.StateDir, "control", "cube.db") }

// SeedFile is what sandboxes' tokens are made from.
func (c *Config) SeedFile() string { return filepath.Join(c.StateDir, "control", "seed") }

// LogDir holds the output of detached containers and the daemons' logs.
func (c *Config) LogDir() string { return filepath.Join(c.StateDir, "logs") }

// AuditFile is the record of what was done; what was before is behind it with .1, and so on.
func (c *Config) AuditFile() string { return filepath.Join(c.LogDir(), "audit.jsonl") }

// ContainerdSocket is the socket that clients of this stack use.
func (c *Config) ContainerdSocket() string {
	if c.Containerd.Address != "" {
		return c.Containerd.Address
	}
	return filepath.Join(c.RunDir, "containerd.sock")
}

// BundleDir is where the private containerd has the bundles of tasks, by namespace and id. It is below its state directory.
func (c *Config) BundleDir() string {
	return filepath.Join(c.RunDir, "containerd", "io.containerd.runtime.v2.task")
}

// SnapshotterSocket is where the proxy snapshotter listens.
func (c *Config) SnapshotterSocket() string { return filepath.Join(c.RunDir, "snapshotter.sock") }

// ControlSocket is where `cube up` answers.
func (c *Config) ControlSocket() string { return filepath.Join(c.RunDir, "cube.sock") }

// VMDir holds one directory per machine.
func (c *Config) VMDir() string { return filepath.Join(c.RunDir, "vm") }

// PodDir holds one directory per pod, with the records of the pod's shim.
func (c *Config) PodDir() string { return filepath.Join(c.RunDir, "pods") }

// QEMUDir is the artefact directory of the QEMU in use: the jail's root.
func (c *Config) QEMUDir() string { return filepath.Join(c.Artefacts, "qemu", "current") }

// GuestDir is the artefact directory of the guest image in use: vmlinuz, initrd.img, modules.img.
func (c *Config) GuestDir() string { return filepath.Join(c.Artefacts, "guest", "current") }

// Size is a number of bytes, written like "256MiB" or "1g" in files.
type Size int64

// UnmarshalText reads a size; units are binary.
func (s *Size) UnmarshalText(b []byte) error {
	n, err := units.RAMInBytes(string(b))
	if err != nil || n < 0 {
		return fmt.Errorf("%q is not a size (use for example 256MiB)", b)
	}
	*s = Size(n)
	return nil
}

// MarshalText writes a size as UnmarshalText reads it.
func (s Size) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

func (s Size) String() string { return units.BytesSize(float64(s)) }

// Duration is a time.Duration, written like "2m" in files.
type Duration time.Duration

// UnmarshalText reads a Go duration.
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil {
		return fmt.Errorf("%q is not a duration (use for example 90s)", b)
	}
	*d = Duration(v)
	return nil
}

// MarshalText writes a duration as UnmarshalText reads it.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }
