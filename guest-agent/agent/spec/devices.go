package spec

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// withheld are the devices that even a container with all devices doesn't get: the channel to the host is the agent's,
// and the runtime makes terminals itself.
var withheld = []string{"vport", "console", "ptmx", "pts", "shm", "mqueue"}

// Devices lists the device nodes below dir (/dev).
func Devices(dir string) ([]specs.LinuxDevice, error) {
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
