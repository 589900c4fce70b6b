package enter

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// interfaces are file systems that hold no files but the host's kernel itself. Whoever serves a tree must not hand on
// what its root may do to them.
var interfaces = []string{
	"autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs", "fusectl",
	"mqueue", "nsfs", "proc", "pstore", "resctrl", "rpc_pipefs", "securityfs", "selinuxfs", "smackfs", "sysfs", "tracefs",
}

// plantTrees puts the trees and a proc, in which only the process itself is to be seen, into a tmpfs over Root.
func plantTrees(s *Spec) error {
	if err := unix.Mount("tmpfs", s.Root, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "size=64k,mode=0755"); err != nil {
		return fmt.Errorf("mount a tmpfs on %s: %w", s.Root, err)
	}
	if err := unix.Chdir(s.Root); err != nil {
		return err
	}
	for _, t := range s.Trees {
		if err := plant(t); err != nil {
			return fmt.Errorf("mount /%s: %w", t.Path, err)
		}
	}
	if err := os.Mkdir("proc", 0o555); err != nil {
		return err
	}
	return mountProc("proc")
}

func plant(t Tree) error {
	var st unix.Stat_t
	if err := unix.Fstat(t.FD, &st); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(t.Path), 0o755); err != nil {
		return err
	}
	point := os.WriteFile
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		point = func(name string, _ []byte, _ os.FileMode) error { return os.Mkdir(name, 0o755) }
	}
	if err := point(t.Path, nil, 0o444); err != nil {
		return err
	}
	return unix.MoveMount(t.FD, "", unix.AT_FDCWD, t.Path, unix.MOVE_MOUNT_F_EMPTY_PATH)
}

// pruneTrees takes the kernel's interfaces out of the trees, which may have the host's root among them. Nothing can come
// in later: the trees are private. The root is theirs already.
func pruneTrees(s *Spec) error {
	if len(s.Trees) == 0 {
		return nil
	}
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	defer f.Close()
	var points []string
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		// ID parent dev root mountpoint options [optional…] - type source superoptions (proc_pid_mountinfo(5))
		mount, super, ok := strings.Cut(lines.Text(), " - ")
		fields, kind := strings.Fields(mount), strings.Fields(super)
		if !ok || len(fields) < 6 || len(kind) < 1 {
			return fmt.Errorf("mountinfo has an unknown format: %.100q", lines.Text())
		}
		point := unescape(strings.TrimPrefix(fields[4], "/"))
		if point == "proc" || !slices.Contains(interfaces, kind[0]) {
			continue
		}
		if slices.ContainsFunc(s.Trees, func(t Tree) bool { return t.Path == point }) {
			return fmt.Errorf("/%s is of type %s, which is the host's kernel and no place for files", point, kind[0])
		}
		points = append(points, point)
	}
	if err := lines.Err(); err != nil {
		return err
	}
	slices.Reverse(points) // what is mounted last, comes off first
	for _, point := range points {
		// Gone with one above it is gone too.
		if err := unix.Unmount(point, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && err != unix.EINVAL && err != unix.ENOENT {
			return fmt.Errorf("take away /%s: %w", point, err)
		}
	}
	return nil
}

// unescape undoes mountinfo's octal escapes of white space and backslashes.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}
