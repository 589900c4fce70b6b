package identity

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"regexp"
	"runtime"

	"golang.org/x/sys/unix"
)

// maxHostname is the kernel's limit (__NEW_UTS_LEN).
const maxHostname = 64

// ErrInvalid says that a name can't be one.
var ErrInvalid = errors.New("invalid identity")

// SetHostname sets the name of the guest; "" leaves it.
func SetHostname(name string) error {
	if name == "" {
		return nil
	}
	if len(name) > maxHostname {
		return fmt.Errorf("%w: the host name %q is longer than %d bytes", ErrInvalid, name, maxHostname)
	}
	if err := unix.Sethostname([]byte(name)); err != nil {
		return fmt.Errorf("set the host name: %w", err)
	}
	return nil
}

// SetHostnameOf sets the name that is seen by a process, and by all that share its UTS namespace.
func SetHostnameOf(pidfd int, name string) error {
	runtime.LockOSThread()
	own, err := unix.Open("/proc/thread-self/ns/uts", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("open the guest's UTS namespace: %w", err)
	}
	defer unix.Close(own)
	if err := unix.Setns(pidfd, unix.CLONE_NEWUTS); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter the UTS namespace: %w", err)
	}
	named := SetHostname(name)
	if err := unix.Setns(own, unix.CLONE_NEWUTS); err != nil {
		// The thread stays locked, so nothing else runs on it.
		return errors.Join(named, fmt.Errorf("leave the UTS namespace: %w", err))
	}
	runtime.UnlockOSThread()
	return named
}

// SetMachineID writes a machine-id(5) that only depends on the sandbox's id.
func SetMachineID(file, sandbox string) error {
	if sandbox == "" {
		return errors.New("a sandbox needs an id")
	}
	sum := sha256.Sum256([]byte("cube machine-id " + sandbox))
	return os.WriteFile(file, []byte(hex.EncodeToString(sum[:16])+"\n"), 0o444)
}

// machineIDs are where a system may have its machine-id(5), below its root.
var machineIDs = []string{"etc/machine-id", "var/lib/dbus/machine-id"}

// machineID is what such a file holds, whole. One that is empty waits for an id, too; "uninitialized" is for a system's own
// first boot to replace.
var machineID = regexp.MustCompile(`^([0-9a-f]{32})?\n?$`)

// CheckMachineID tells whether an id can be one.
func CheckMachineID(id string) error {
	if len(id) != 32 || !machineID.MatchString(id) {
		return fmt.Errorf("%w: %q is no machine-id", ErrInvalid, id)
	}
	return nil
}

// ReplaceMachineID puts an id in the place of the one that the system below root has. Where it has no such file, or one that
// can't be written or holds something else, there is none to replace. What is below root is a workload's: links lead
// nowhere else, and nothing but regular files is opened. Nobody may change it meanwhile.
func ReplaceMachineID(root, id string) error {
	if err := CheckMachineID(id); err != nil {
		return err
	}
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the root %s: %w", root, err)
	}
	defer unix.Close(dir)
	for _, file := range machineIDs {
		if err := replaceID(dir, file, id); err != nil {
			return fmt.Errorf("replace the machine-id in /%s: %w", file, err)
		}
	}
	return nil
}

func replaceID(root int, file, id string) error {
	// First without opening what it is: that alone does something with a device or a pipe.
	at, err := unix.Openat2(root, file, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	})
	switch err {
	case nil:
	case unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.EXDEV, unix.ENAMETOOLONG:
		return nil
	default:
		return err
	}
	defer unix.Close(at)
	var st unix.Stat_t
	if err := unix.Fstat(at, &st); err != nil {
		return err
	}
	content := []byte(id + "\n")
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > int64(len(content)) {
		return nil
	}
	f, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", at), os.O_RDWR, 0)
	switch {
	case errors.Is(err, unix.EROFS), errors.Is(err, unix.EPERM): // a root that is only read, a file that is immutable
		return nil
	case err != nil:
		return err
	}
	defer f.Close()
	has := make([]byte, len(content))
	n, err := f.ReadAt(has, 0)
	if n < int(st.Size) {
		return fmt.Errorf("read it: %w", err)
	}
	if !machineID.Match(has[:n]) {
		return nil
	}
	// In place: a file with several names stays one, and at no time it holds less than an id.
	if _, err := f.WriteAt(content, 0); err != nil {
		return err
	}
	return f.Close()
}
