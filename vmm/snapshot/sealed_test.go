package snapshot_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/memory"
)

// testSealed: with a QEMU's uid and all that it has open nothing can be changed of what others are made from, be it a base
// or a snapshot.
func (h *host) testSealed(t *testing.T) {
	parent := h.fresh(t, "of-base")
	saved := h.save(t, "template", parent)
	clone := h.must(t, vmm.Request{ID: "of-snapshot", Snapshot: "template"})
	clone.Must(t, h.cfg, "ping")
	h.save(t, "again", clone) // leaves QEMU with nothing of it

	templates, err := filepath.Glob(filepath.Join(h.cfg.BaseDir(), "*", "*"))
	if err != nil || len(templates) == 0 {
		t.Fatalf("no base, %v", err)
	}
	for _, id := range []string{"template", "again"} {
		files, err := filepath.Glob(filepath.Join(h.cfg.SnapshotDir(), id, "*"))
		if err != nil || len(files) < 4 {
			t.Fatalf("snapshot %s has %v, %v", id, files, err)
		}
		templates = append(templates, files...)
	}
	before := sums(t, templates)
	for name, m := range map[string]*machine{"base": parent, "snapshot": clone} {
		t.Run(name, func(t *testing.T) {
			tmpl := h.attack(t, m)
			if name == "snapshot" {
				if err := saved.Memory.Digests.Check(tmpl, saved.Memory.Size); err != nil {
					t.Errorf("the memory that clones share: %v", err)
				}
			}
		})
	}
	for path, sum := range sums(t, templates) {
		if before[path] != sum {
			t.Errorf("%s has changed", path)
		}
	}
	for _, m := range []*machine{parent, clone} {
		m.Must(t, h.cfg, "hog 10")
		if err := stop(m); err != nil {
			t.Error(err)
		}
	}
	for _, id := range []string{"template", "again"} {
		if _, err := h.store.Delete(id); err != nil {
			t.Error(err)
		}
	}
}

func sums(t *testing.T, paths []string) map[string][sha256.Size]byte {
	t.Helper()
	all := map[string][sha256.Size]byte{}
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		all[path] = sha256.Sum256(b)
	}
	return all
}

// attack has a process of QEMU's uid try all that could change the files that QEMU has open and that aren't the machine's
// own. It returns the memory that it shares with others.
func (h *host) attack(t *testing.T, m *machine) *os.File {
	t.Helper()
	proc := fmt.Sprintf("/proc/%d", m.PID())
	pidfd, err := unix.PidfdOpen(m.PID(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pidfd)
	fds, err := os.ReadDir(filepath.Join(proc, "fd"))
	if err != nil {
		t.Fatal(err)
	}
	var tmpl *os.File
	var files []*os.File
	var orders order
	for _, e := range fds {
		n, err := strconv.Atoi(e.Name())
		if err != nil {
			t.Fatal(err)
		}
		// The very descriptor, as QEMU has it.
		fd, err := unix.PidfdGetfd(pidfd, n, 0)
		if err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(fd), e.Name())
		t.Cleanup(func() { f.Close() })
		target, err := os.Readlink(filepath.Join(proc, "fd", e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		info, err := f.Stat()
		if err != nil {
			t.Fatal(err)
		}
		own := filepath.Dir(target) == m.disks || filepath.Dir(target) == h.cfg.StoreDir() && filepath.Ext(target) == ".img"
		if own || !info.Mode().IsRegular() || strings.HasPrefix(target, "anon_inode:") {
			continue
		}
		if strings.HasPrefix(target, "/memfd:guest memory") {
			tmpl = f
		}
		files = append(files, f)
		orders.Names = append(orders.Names, e.Name()+" "+target)
		orders.Paths = append(orders.Paths, filepath.Join(proc, "fd", e.Name()))
	}
	for _, part := range []string{"modules.img", "/memfd:guest memory"} { // the state has been closed, once loaded
		if !slices.ContainsFunc(orders.Names, func(name string) bool { return strings.Contains(name, part) }) {
			t.Fatalf("of what QEMU has open, %v, nothing is %s", orders.Names, part)
		}
	}
	mapped := mappings(t, proc, tmpl)
	for _, at := range mapped {
		orders.Paths = append(orders.Paths, filepath.Join(proc, "map_files", at))
	}
	orders.UID = owner(t, proc)
	orders.QEMU = m.PID()
	text, err := json.Marshal(orders)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestAttacker$", "-test.v")
	cmd.Env = append(os.Environ(), attackEnv+"="+string(text))
	cmd.ExtraFiles = files
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS: TestAttacker")) {
		t.Errorf("with uid %d and the descriptors %q: %v\n%s", orders.UID, orders.Names, err, out)
	}
	return tmpl
}

// mappings are where a process has f mapped. Each has to be its own copy on writing.
func mappings(t *testing.T, proc string, f *os.File) []string {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(proc, "maps"))
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for line := range strings.Lines(string(text)) {
		field := strings.Fields(line)
		if len(field) < 5 || field[4] != fmt.Sprint(st.Ino) || !strings.Contains(line, "memfd") {
			continue
		}
		if !strings.HasSuffix(field[1], "p") {
			t.Errorf("QEMU maps its memory shared: %s", line)
		}
		all = append(all, field[0])
	}
	if len(all) == 0 {
		t.Error("QEMU doesn't map its memory")
	}
	return all
}

func owner(t *testing.T, proc string) int {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(proc, &st); err != nil {
		t.Fatal(err)
	}
	if st.Uid == 0 {
		t.Fatal("QEMU is root's")
	}
	return int(st.Uid)
}

const attackEnv = "CUBE_TEST_ATTACK"

// order is what the attacker has: QEMU's uid, its descriptors from 3 on and their names, and other ways to the same files.
type order struct {
	UID, QEMU    int
	Names, Paths []string
}

// TestAttacker is a process that has taken over a QEMU, but for the jail's seccomp filter and root, which it needn't get by.
func TestAttacker(t *testing.T) {
	text := os.Getenv(attackEnv)
	if text == "" {
		t.Skip("for other tests")
	}
	var o order
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(syscall.Setgroups(nil), syscall.Setgid(o.UID), syscall.Setuid(o.UID), unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0)); err != nil {
		t.Fatal(err)
	}
	// The attempts do harm where nothing prevents it.
	free, err := memory.Scratch(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	if worked := tries(free); len(worked) != len(attempts) {
		t.Errorf("of %d attempts only these work on a file that anybody may write to: %v", len(attempts), worked)
	}
	for i, name := range o.Names {
		f := os.NewFile(uintptr(3+i), name)
		report(t, name, tries(f))
		o.Paths = append(o.Paths, fmt.Sprintf("/proc/self/fd/%d", 3+i))
	}
	for _, path := range o.Paths {
		for _, mode := range []int{os.O_RDWR, os.O_WRONLY, os.O_RDONLY, os.O_RDWR | os.O_TRUNC} {
			f, err := os.OpenFile(path, mode, 0)
			if err != nil {
				t.Logf("%s with mode %#x: %v", path, mode, err)
				continue
			}
			report(t, fmt.Sprintf("%s with mode %#x", path, mode), tries(f))
			f.Close()
		}
	}
}

func report(t *testing.T, name string, worked []string) {
	t.Helper()
	if len(worked) > 0 {
		t.Errorf("%s: %v works", name, worked)
	} else {
		t.Logf("%s: all refused", name)
	}
}

// tries makes all attempts on a file and returns those that worked.
func tries(f *os.File) []string {
	var worked []string
	for _, all := range []map[string]func(fd int) error{attempts, futile} {
		for name, try := range all {
			if try(int(f.Fd())) == nil {
				worked = append(worked, name)
			}
		}
	}
	slices.Sort(worked)
	return worked
}

const page = 4096

// attempts are the ways to change a file that one has open.
var attempts = map[string]func(fd int) error{
	"write":  func(fd int) error { _, err := unix.Write(fd, []byte("x")); return err },
	"pwrite": func(fd int) error { _, err := unix.Pwrite(fd, []byte("x"), page); return err },
	"append": func(fd int) error {
		end, err := unix.Seek(fd, 0, io.SeekEnd)
		if err == nil {
			_, err = unix.Pwrite(fd, []byte("x"), end)
		}
		return err
	},
	"pwritev2": func(fd int) error {
		_, err := unix.Pwritev2(fd, [][]byte{[]byte("x")}, -1, unix.RWF_APPEND)
		return err
	},
	"truncate": func(fd int) error { return unix.Ftruncate(fd, page) },
	"grow":     func(fd int) error { return unix.Ftruncate(fd, 1<<40) },
	"allocate": func(fd int) error { return unix.Fallocate(fd, 0, 1<<40, page) },
	"punch": func(fd int) error {
		return unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, page)
	},
	"sendfile": func(fd int) error {
		from, err := os.Open("/proc/self/exe")
		if err != nil {
			return err
		}
		defer from.Close()
		if _, err := unix.Seek(fd, 0, io.SeekStart); err != nil {
			return err
		}
		_, err = unix.Sendfile(fd, int(from.Fd()), nil, page)
		return err
	},
	"copy_file_range": func(fd int) error {
		from, err := memory.Scratch(page)
		if err != nil {
			return err
		}
		defer from.Close()
		at := int64(0)
		_, err = unix.CopyFileRange(int(from.Fd()), nil, fd, &at, page, 0)
		return err
	},
	"chmod": func(fd int) error { return unix.Fchmod(fd, 0o600) },
	"seal":  func(fd int) error { _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, 0); return err },
	"map": func(fd int) error {
		return withMap(fd, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED, func([]byte) error { return nil })
	},
	"map and protect": func(fd int) error {
		return withMap(fd, unix.PROT_READ, unix.MAP_SHARED, func(b []byte) error { return unix.Mprotect(b, unix.PROT_READ|unix.PROT_WRITE) })
	},
	"map and remove": func(fd int) error {
		return withMap(fd, unix.PROT_READ, unix.MAP_SHARED, func(b []byte) error { return unix.Madvise(b, unix.MADV_REMOVE) })
	},
}

// futile are those that change no file at all, as long as the kernel keeps its word.
var futile = map[string]func(fd int) error{
	"map and write to /proc/self/mem": func(fd int) error {
		return withMap(fd, unix.PROT_READ, unix.MAP_SHARED, poke)
	},
	"write to a private map": func(fd int) error {
		return withMap(fd, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE, func(b []byte) error {
			var was [1]byte
			_, err := unix.Pread(fd, was[:], 0)
			b[0] = ^was[0]
			if err = errors.Join(err, poke(b)); err != nil {
				return err
			}
			var is [1]byte
			if _, err := unix.Pread(fd, is[:], 0); err != nil || is == was {
				return errors.Join(errors.New("it stays private"), err)
			}
			return nil
		})
	},
}

// withMap has a page of a file mapped.
func withMap(fd, prot, flags int, do func([]byte) error) error {
	b, err := unix.Mmap(fd, 0, page, prot, flags)
	if err != nil {
		return err
	}
	return errors.Join(do(b), unix.Munmap(b))
}

// poke writes to memory as a debugger would, whatever its protection.
func poke(b []byte) error {
	mem, err := os.OpenFile("/proc/self/mem", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer mem.Close()
	_, err = mem.WriteAt([]byte("p"), int64(uintptr(unsafe.Pointer(&b[0]))))
	return err
}
