package spec

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// withheld are the devices that even a container with all devices doesn't get: the channel to the host is the agent's,
// and the runtime makes terminals itself.
var withheld = []string{"vport", "console", "ptmx", "pts", "shm", "mqueue"}

// onDemand are devices whose drivers are modules that the kernel loads when somebody opens the node, by their numbers in
// Documentation/admin-guide/devices.txt.
var onDemand = func() []specs.LinuxDevice {
	mode, id := os.FileMode(0o666), uint32(0)
	character := func(path string, minor int64) specs.LinuxDevice {
		return specs.LinuxDevice{Path: path, Type: "c", Major: 10, Minor: minor, FileMode: &mode, UID: &id, GID: &id}
	}
	all := []specs.LinuxDevice{character("/dev/fuse", 229), character("/dev/net/tun", 200), character("/dev/loop-control", 237)}
	private := os.FileMode(0o660)
	all[2].FileMode = &private
	for n := range int64(8) {
		all = append(all, specs.LinuxDevice{Path: "/dev/loop" + strconv.FormatInt(n, 10), Type: "b", Major: 7, Minor: n, FileMode: &private, UID: &id, GID: &id})
	}
	return all
}()

// Devices lists the device nodes below dir (/dev), and those that there are when somebody asks for them.
func Devices(dir string) ([]specs.LinuxDevice, error) {
	devices, err := nodes(dir)
	for _, d := range onDemand {
		if !slices.ContainsFunc(devices, func(o specs.LinuxDevice) bool { return o.Path == d.Path }) {
			devices = append(devices, d)
		}
	}
	return devices, err
}

func nodes(dir string) ([]specs.LinuxDevice, error) {
	var devices []specs.LinuxDevice
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) { // just gone
				return nil
			}
			return err
		}
		for _, prefix := range withheld {
			if strings.HasPrefix(d.Name(), prefix) {
				if d.IsDir() {
					return fs.SkipDir
				}
				return nil
			}
		}
		if d.Type()&fs.ModeDevice == 0 {
			return nil
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return nil // just gone
		}
		kind := "b"
		if st.Mode&unix.S_IFMT == unix.S_IFCHR {
			kind = "c"
		}
		mode := os.FileMode(st.Mode & 0o777)
		devices = append(devices, specs.LinuxDevice{
			Path: path, Type: kind, FileMode: &mode, UID: &st.Uid, GID: &st.Gid,
			Major: int64(unix.Major(st.Rdev)), Minor: int64(unix.Minor(st.Rdev)),
		})
		return nil
	})
	return devices, err
}
