package spec

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// maxFile bounds a file that is copied into the guest.
const maxFile = 64 << 10

// hostTrees are where the host's kernel shows itself, and kernelTypes the types of its file systems, wherever they are
// mounted. To a guest they would be of no use, or a way out.
var (
	hostTrees   = []string{"/proc", "/sys", "/dev"}
	kernelTypes = []int64{
		unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC, unix.DEVPTS_SUPER_MAGIC,
		unix.DEBUGFS_MAGIC, unix.TRACEFS_MAGIC, unix.SECURITYFS_MAGIC, unix.BPF_FS_MAGIC, unix.NSFS_MAGIC,
	}
)

// source is a file or directory of the host that a mount names, opened as a mere place (O_PATH).
type source struct {
	*os.File
	path string // without symbolic links
	mode fs.FileMode
	on   unix.Statfs_t // the file system
}

// openSource opens what a container may see of the host.
func openSource(name string, recursive bool) (_ *source, err error) {
	f, err := os.OpenFile(name, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, invalid("%s doesn't exist on the host", name)
		}
		return nil, fmt.Errorf("look at the source: %w", err)
	}
	s := &source{File: f}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("look at the source: %w", err)
	}
	s.mode = info.Mode()
	if s.path, err = os.Readlink(s.magic()); err != nil {
		return nil, fmt.Errorf("look at the source: %w", err)
	}
	if !s.mode.IsDir() && !s.mode.IsRegular() {
		return nil, unsupported("%s is a %s of the host, which a virtual machine can't use; only files and directories can be mounted", name, kind(s.mode))
	}
	if err := unix.Fstatfs(int(f.Fd()), &s.on); err != nil {
		return nil, fmt.Errorf("look at the source's file system: %w", err)
	}
	if slices.Contains(kernelTypes, s.on.Type) || slices.ContainsFunc(hostTrees, func(tree string) bool {
		return within(s.path, tree) || within(filepath.Clean(name), tree)
	}) {
		return nil, unsupported("%s is of the host's kernel, which can't be given to a virtual machine; the container can have the machine's own /proc, /sys and /dev", name)
	}
	if recursive && s.path == "/" {
		return nil, unsupported("all of the host's file systems, with /proc, /sys and /dev, can't be given to a virtual machine; mount the directories that are needed, or without rbind")
	}
	return s, nil
}

// magic is a name for the very file that was opened, whatever is in its place meanwhile.
func (s *source) magic() string { return fmt.Sprintf("/proc/self/fd/%d", s.Fd()) }

func within(path, tree string) bool { return path == tree || strings.HasPrefix(path, tree+"/") }

func kind(m fs.FileMode) string {
	switch {
	case m&fs.ModeDevice != 0:
		return "device"
	case m&fs.ModeSocket != 0:
		return "socket"
	case m&fs.ModeNamedPipe != 0:
		return "fifo"
	}
	return "special file"
}

// content is a small file's.
func (s *source) content() ([]byte, error) {
	f, err := os.Open(s.magic())
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", s.path, err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", s.path, err)
	}
	if len(b) > maxFile {
		return nil, invalid("%s is larger than %d KiB", s.path, maxFile>>10)
	}
	return b, nil
}

// tmpfsSize is the size of the tmpfs that the source is on, 0 for none, or no limit.
func (s *source) tmpfsSize() int64 {
	if s.on.Type != unix.TMPFS_MAGIC {
		return 0
	}
	return int64(s.on.Blocks) * s.on.Bsize
}
