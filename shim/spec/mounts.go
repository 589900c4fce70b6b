package spec

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/internal/config"
)

// The mounts of things of the host, as the guest gets them; see agent.proto.
const (
	shareMount = "cube-share"
	fileMount  = "cube-file"
	shmMount   = "cube-shm"
)

// ToolsMount is the type of the mount that is the directory with the guest image's programs for containers.
const ToolsMount = "cube-tools"

const (
	// maxShares and maxFiles are what the agent takes of a container.
	maxShares = 64
	maxFiles  = 16
	// defaultShm is the size of a /dev/shm that doesn't say it: Docker's and Kubernetes' own.
	defaultShm = 64 << 20
)

// guestMounts are the types of mounts that are made in the guest, of nothing from the host.
var guestMounts = []string{"proc", "sysfs", "tmpfs", "devpts", "mqueue", "cgroup", "cgroup2", ToolsMount}

// copied are the files that are made anew for each container, and that nobody writes on the host afterwards: the guest
// gets what is in them, which costs it less than a share.
var copied = []string{"/etc/resolv.conf", "/etc/hosts", "/etc/hostname"}

// mounts turns those of files of the host into shares and copies.
func mounts(p *Plan, _ *config.Config) error {
	for i, m := range p.Guest.Mounts {
		if len(m.UIDMappings) > 0 || len(m.GIDMappings) > 0 {
			return unsupported("mount %s: id-mapped mounts are not supported", m.Destination)
		}
		if isBind(m) {
			bound, err := p.bind(m)
			if err != nil {
				return err
			}
			p.Guest.Mounts[i] = bound
			continue
		}
		if !slices.Contains(guestMounts, m.Type) {
			return unsupported("mount %s: file system type %q is not available in a virtual machine; available are bind, %s",
				m.Destination, m.Type, strings.Join(guestMounts, ", "))
		}
	}
	return nil
}

func isBind(m specs.Mount) bool {
	return m.Type == "bind" || slices.Contains(m.Options, "bind") || slices.Contains(m.Options, "rbind")
}

// bind makes of a bind mount the mount that the guest gets.
func (p *Plan) bind(m specs.Mount) (specs.Mount, error) {
	refuse := func(err error) (specs.Mount, error) {
		return specs.Mount{}, fmt.Errorf("mount %s: %w", m.Destination, err)
	}
	o, err := bindOptions(m.Options)
	if err != nil {
		return refuse(err)
	}
	src, err := openSource(m.Source, o.recursive)
	if err != nil {
		return refuse(err)
	}
	defer src.Close()
	made := specs.Mount{Destination: m.Destination, Options: o.guest}
	switch dest := path.Clean(m.Destination); {
	case slices.Contains(copied, dest) && src.mode.IsRegular():
		if len(p.Files) == maxFiles {
			return refuse(invalid("a container can have at most %d such files", maxFiles))
		}
		content, err := src.content()
		if err != nil {
			return refuse(err)
		}
		made.Type, made.Source = fileMount, strconv.Itoa(len(p.Files))
		p.Files = append(p.Files, File{Content: content, Mode: uint32(src.mode.Perm())})
	case dest == "/dev/shm" && src.mode.IsDir():
		size := src.tmpfsSize()
		if size <= 0 {
			size = defaultShm
		}
		made.Type, made.Source = shmMount, "shm"
		made.Options = append(made.Options, fmt.Sprintf("size=%d", size))
	default:
		if len(p.Shares) == maxShares {
			return refuse(invalid("a container can have at most %d bind mounts", maxShares))
		}
		made.Type, made.Source = shareMount, strconv.Itoa(len(p.Shares))
		p.Shares = append(p.Shares, Share{Source: src.path, ReadOnly: o.readOnly, Recursive: o.recursive})
		if o.slave {
			p.drop("mount " + m.Destination + ": what the host mounts later (slave)")
		}
	}
	return made, nil
}

// options are a bind mount's.
type options struct {
	guest               []string // for the mount in the guest
	readOnly, recursive bool
	slave               bool // would see what the host mounts later
}

// perMount are the options of mounts that mean the same in the guest. Each has a recursive form in r…, which comes to
// the same, since a share is one mount in the guest.
var perMount = []string{
	"ro", "rw", "suid", "nosuid", "dev", "nodev", "exec", "noexec", "atime", "noatime", "diratime", "nodiratime",
	"relatime", "norelatime", "strictatime", "nostrictatime",
}

// ignored are options that say nothing that matters to the guest, which no mount of the host's gets to anyway.
var ignored = []string{
	"bind", "defaults", "private", "rprivate", "unbindable", "runbindable", "z", "Z",
}

// labels are options of SELinux, whose policy is the host's.
var labels = []string{"context=", "fscontext=", "defcontext=", "rootcontext="}

func bindOptions(all []string) (o options, err error) {
	for _, name := range all {
		plain := name
		if !slices.Contains(perMount, name) {
			plain = strings.TrimPrefix(name, "r")
		}
		switch {
		case slices.Contains(perMount, plain):
			o.guest = append(o.guest, plain)
			switch plain {
			case "ro":
				o.readOnly = true
			case "rw":
				o.readOnly = false
			}
		case name == "rbind":
			o.recursive = true
		case name == "slave" || name == "rslave":
			o.slave = true
		case name == "shared" || name == "rshared":
			return o, unsupported("option %s: mounts that the container makes can't show up on the host, from inside of a virtual machine; use private or slave", name)
		case name == "idmap" || name == "ridmap":
			return o, unsupported("id-mapped mounts are not supported")
		case slices.Contains(ignored, name):
		case slices.ContainsFunc(labels, func(l string) bool { return strings.HasPrefix(name, l) }):
		default:
			return o, unsupported("option %q of a bind mount is not available in a virtual machine", name)
		}
	}
	return o, nil
}
