package spec

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// The types of mounts that are the guest's own (agent.proto, CreateContainerRequest).
const (
	fileMount  = "cube-file"
	shareMount = "cube-share"
	shmMount   = "cube-shm"
	toolsMount = "cube-tools"
)

// mounts makes bind mounts of those that stand for something that the agent has prepared. Other bind mounts are refused:
// their sources would be the agent's files.
func mounts(s *specs.Spec, g Guest) error {
	for i := range s.Mounts {
		m := &s.Mounts[i]
		if m.Type == "bind" || slices.Contains(m.Options, "bind") || slices.Contains(m.Options, "rbind") {
			return fmt.Errorf("the source %q of mount %s isn't in the guest", m.Source, m.Destination)
		}
		source, ok, err := prepared(m, g)
		if err != nil {
			return fmt.Errorf("mount %s: %w", m.Destination, err)
		}
		if ok {
			m.Type, m.Source = "bind", source
			m.Options = append([]string{"bind"}, bindOptions(m.Options)...)
		}
	}
	return nil
}

// resolver gives the container the guest's resolv.conf, unless a mount of its own brings one, or the directory.
func resolver(s *specs.Spec, g Guest) error {
	const file = "/etc/resolv.conf"
	own := func(m specs.Mount) bool {
		at := path.Join("/", m.Destination)
		return at == file || at == path.Dir(file)
	}
	if g.ResolvConf == "" || slices.ContainsFunc(s.Mounts, own) {
		return nil
	}
	options := []string{"bind", "nosuid", "nodev", "noexec"}
	if s.Root.Readonly {
		options = append(options, "ro")
	}
	s.Mounts = append(s.Mounts, specs.Mount{Destination: file, Type: "bind", Source: g.ResolvConf, Options: options})
	return nil
}

// prepared is where what a mount stands for is, if it is one of the guest's own types.
func prepared(m *specs.Mount, g Guest) (source string, ok bool, err error) {
	switch m.Type {
	case fileMount:
		source, err = element(g.Files, m.Source)
	case shareMount:
		source, err = element(g.Shares, m.Source)
	case shmMount:
		if g.Shm == nil {
			return "", true, errors.New("there is no shared memory to have in common")
		}
		source, err = g.Shm(size(m.Options))
	case toolsMount:
		if g.Tools == nil {
			return "", true, errors.New("there are no tools for containers")
		}
		source, err = g.Tools()
	default:
		return "", false, nil
	}
	return source, true, err
}

// element returns the path that a mount's source, a decimal index, stands for.
func element(paths []string, source string) (string, error) {
	n, err := strconv.ParseUint(source, 10, 16)
	if err != nil || n >= uint64(len(paths)) {
		return "", fmt.Errorf("%q is no index below %d", source, len(paths))
	}
	return paths[n], nil
}

// size is the option size= of a mount, "" when it has none.
func size(options []string) string {
	for _, o := range options {
		if s, ok := strings.CutPrefix(o, "size="); ok {
			return s
		}
	}
	return ""
}

// bindOptions are those that a bind mount takes: the file system's own were for whoever mounted it.
func bindOptions(options []string) []string {
	return slices.DeleteFunc(slices.Clone(options), func(o string) bool { return strings.Contains(o, "=") })
}
