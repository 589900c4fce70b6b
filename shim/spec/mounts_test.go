package spec

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// mounted transforms a plain spec with these mounts besides.
func mounted(mounts ...specs.Mount) (*Plan, error) {
	s := plain()
	s.Mounts = append(s.Mounts, mounts...)
	return Transform(s, defaults())
}

// last is the last mount that the guest gets.
func (p *Plan) last() specs.Mount { return p.Guest.Mounts[len(p.Guest.Mounts)-1] }

func write(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), 0o640); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestShares(t *testing.T) {
	dir := t.TempDir()
	file := write(t, "file", "x")
	link := filepath.Join(dir, "link")
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		mount   specs.Mount
		share   Share
		options []string
	}{
		"directory":       {specs.Mount{Type: "bind", Source: dir}, Share{Source: dir}, nil},
		"file":            {specs.Mount{Type: "bind", Source: file, Options: []string{"bind", "ro"}}, Share{Source: file, ReadOnly: true}, []string{"ro"}},
		"symbolic link":   {specs.Mount{Type: "bind", Source: link}, Share{Source: file}, nil},
		"type of options": {specs.Mount{Type: "none", Source: dir, Options: []string{"bind"}}, Share{Source: dir}, nil},
		"as CRI does": {
			specs.Mount{Type: "bind", Source: dir, Options: []string{"rbind", "rslave", "rw"}},
			Share{Source: dir, Recursive: true}, []string{"rw"},
		},
		"recursively read-only": {
			specs.Mount{Type: "bind", Source: dir, Options: []string{"rbind", "rprivate", "rro"}},
			Share{Source: dir, Recursive: true, ReadOnly: true}, []string{"ro"},
		},
		"last one counts": {specs.Mount{Type: "bind", Source: dir, Options: []string{"ro", "rw"}}, Share{Source: dir}, []string{"ro", "rw"}},
		"all options": {
			specs.Mount{Type: "bind", Source: dir, Options: []string{
				"defaults", "private", "slave", "unbindable", "z", `context="system_u:object_r:x"`, "nosuid", "nodev", "noexec", "noatime", "rnosuid",
			}},
			Share{Source: dir}, []string{"nosuid", "nodev", "noexec", "noatime", "nosuid"},
		},
		"unclean destination": {specs.Mount{Type: "bind", Source: dir, Destination: "/a/../etc/hosts"}, Share{Source: dir}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			if c.mount.Destination == "" {
				c.mount.Destination = "/data"
			}
			p, err := mounted(c.mount)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(p.Shares, []Share{c.share}) || len(p.Files) != 0 {
				t.Errorf("shares %+v, files %v", p.Shares, p.Files)
			}
			m := p.last()
			if m.Type != "cube-share" || m.Source != "0" || m.Destination != c.mount.Destination || !slices.Equal(m.Options, c.options) {
				t.Errorf("the guest mounts %+v", m)
			}
			if slave := slices.Contains(c.mount.Options, "slave") || slices.Contains(c.mount.Options, "rslave"); slave != (len(p.Dropped) == 1) {
				t.Errorf("left out: %v", p.Dropped)
			}
			if b, err := json.Marshal(p.Guest); err != nil || strings.Contains(string(b), c.mount.Source) {
				t.Errorf("a path of the host is left in %s", b)
			}
		})
	}
}

// Several mounts refer to their own shares and files.
func TestIndexes(t *testing.T) {
	a, b, hosts, resolv := t.TempDir(), t.TempDir(), write(t, "hosts", "::1 localhost\n"), write(t, "resolv.conf", "")
	p, err := mounted(
		specs.Mount{Destination: "/a", Type: "bind", Source: a},
		specs.Mount{Destination: "/etc/hosts", Type: "bind", Source: hosts, Options: []string{"rbind", "ro", "nodev"}},
		specs.Mount{Destination: "/tmp", Type: "tmpfs", Source: "tmpfs", Options: []string{"size=1m"}},
		specs.Mount{Destination: "/b", Type: "bind", Source: b},
		specs.Mount{Destination: "/etc/./resolv.conf", Type: "bind", Source: resolv, Options: []string{"bind"}},
	)
	if err != nil {
		t.Fatal(err)
	}
	if want := []Share{{Source: a}, {Source: b}}; !slices.Equal(p.Shares, want) {
		t.Errorf("shares %+v, want %+v", p.Shares, want)
	}
	if len(p.Files) != 2 || string(p.Files[0].Content) != "::1 localhost\n" || p.Files[0].Mode != 0o640 || len(p.Files[1].Content) != 0 {
		t.Errorf("files %+v", p.Files)
	}
	var got []string
	for _, m := range p.Guest.Mounts[len(p.Guest.Mounts)-5:] {
		got = append(got, fmt.Sprintf("%s %s %v", m.Type, m.Source, m.Options))
	}
	want := []string{"cube-share 0 []", "cube-file 0 [ro nodev]", "tmpfs tmpfs [size=1m]", "cube-share 1 []", "cube-file 1 []"}
	if !slices.Equal(got, want) {
		t.Errorf("the guest mounts %q, want %q", got, want)
	}
}

func TestSharedMemory(t *testing.T) {
	plainDir, tmpfs := t.TempDir(), t.TempDir()
	if os.Geteuid() == 0 {
		if err := unix.Mount("shm", tmpfs, "tmpfs", 0, "size=8m"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(tmpfs, unix.MNT_DETACH) })
	}
	for _, c := range []struct {
		source, size string
		root         bool
	}{{tmpfs, "size=8388608", true}, {plainDir, "size=67108864", false}} {
		var st unix.Statfs_t
		if err := unix.Statfs(c.source, &st); err != nil {
			t.Fatal(err)
		}
		if c.root != (st.Type == unix.TMPFS_MAGIC) {
			t.Logf("%s can't be tried here", c.size)
			continue
		}
		p, err := mounted(specs.Mount{Destination: "/dev/shm", Type: "bind", Source: c.source, Options: []string{"rbind", "ro", "nosuid"}})
		if err != nil {
			t.Fatal(err)
		}
		if m := p.last(); m.Type != "cube-shm" || !slices.Equal(m.Options, []string{"ro", "nosuid", c.size}) || len(p.Shares) != 0 {
			t.Errorf("the guest mounts %+v", m)
		}
	}
}

// Each refusal names the mount, and what is wrong with it.
func TestMountsRefused(t *testing.T) {
	dir := t.TempDir()
	fifo, socket, link := filepath.Join(dir, "fifo"), filepath.Join(dir, "socket"), filepath.Join(dir, "link")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := os.Symlink("/proc/self", link); err != nil {
		t.Fatal(err)
	}
	bind := func(source string, options ...string) specs.Mount {
		return specs.Mount{Type: "bind", Source: source, Options: options}
	}
	for name, c := range map[string]struct {
		mount specs.Mount
		is    func(error) bool
		says  string
	}{
		"missing":         {bind(dir + "/none"), errdefs.IsInvalidArgument, "doesn't exist"},
		"fifo":            {bind(fifo), errdefs.IsFailedPrecondition, "is a fifo"},
		"socket":          {bind(socket), errdefs.IsFailedPrecondition, "is a socket"},
		"device":          {bind("/dev/null"), errdefs.IsFailedPrecondition, "is a device"},
		"devices":         {bind("/dev", "rbind"), errdefs.IsFailedPrecondition, "/dev is of the host's kernel"},
		"proc":            {bind("/proc"), errdefs.IsFailedPrecondition, "/proc is of the host's kernel"},
		"process":         {bind("/proc/self/root/etc"), errdefs.IsFailedPrecondition, "host's kernel"},
		"process by link": {bind(link), errdefs.IsFailedPrecondition, "host's kernel"},
		"namespace":       {bind("/proc/self/ns/net"), errdefs.IsFailedPrecondition, "host's kernel"},
		"cgroups":         {bind("/sys/fs/cgroup", "rbind", "ro"), errdefs.IsFailedPrecondition, "host's kernel"},
		"around":          {bind("/usr/../sys/kernel"), errdefs.IsFailedPrecondition, "host's kernel"},
		"everything":      {bind("/", "rbind", "ro"), errdefs.IsFailedPrecondition, "without rbind"},
		"shared":          {bind(dir, "bind", "rshared"), errdefs.IsFailedPrecondition, "rshared"},
		"id-mapped":       {bind(dir, "bind", "idmap"), errdefs.IsFailedPrecondition, "id-mapped"},
		"odd option":      {bind(dir, "bind", "size=1m"), errdefs.IsFailedPrecondition, `"size=1m"`},
		"tmpfs that binds": {
			specs.Mount{Type: "tmpfs", Source: dir + "/none", Options: []string{"rbind"}}, errdefs.IsInvalidArgument, "doesn't exist",
		},
	} {
		t.Run(name, func(t *testing.T) {
			c.mount.Destination = "/in/the/container"
			_, err := mounted(c.mount)
			refused(t, err, c.is, c.says)
			refused(t, err, c.is, "mount /in/the/container: ")
		})
	}
	// What is copied must be small, but the same file can be mounted elsewhere.
	large := write(t, "large", strings.Repeat("x", maxFile+1))
	_, err = mounted(specs.Mount{Destination: "/etc/hosts", Type: "bind", Source: large})
	refused(t, err, errdefs.IsInvalidArgument, "mount /etc/hosts: "+large+" is larger than 64 KiB")
	if _, err := mounted(specs.Mount{Destination: "/etc/hosts", Type: "bind", Source: write(t, "most", strings.Repeat("x", maxFile))}); err != nil {
		t.Error(err)
	}
	if _, err := mounted(specs.Mount{Destination: "/large", Type: "bind", Source: large}); err != nil {
		t.Error(err)
	}
	// All of the host without what is mounted on it is an ordinary directory.
	if _, err := mounted(specs.Mount{Destination: "/host", Type: "bind", Source: "/", Options: []string{"bind", "ro"}}); err != nil {
		t.Error(err)
	}
}

func TestMostMounts(t *testing.T) {
	for _, c := range []struct {
		mount specs.Mount
		most  int
	}{
		{specs.Mount{Destination: "/x", Type: "bind", Source: t.TempDir()}, maxShares},
		{specs.Mount{Destination: "/etc/hosts", Type: "bind", Source: write(t, "hosts", "")}, maxFiles},
	} {
		if _, err := mounted(slices.Repeat([]specs.Mount{c.mount}, c.most)...); err != nil {
			t.Error(err)
		}
		_, err := mounted(slices.Repeat([]specs.Mount{c.mount}, c.most+1)...)
		refused(t, err, errdefs.IsInvalidArgument, fmt.Sprintf("at most %d", c.most))
	}
}

// A source may be relative to the bundle.
func TestRelativeSource(t *testing.T) {
	s := plain()
	s.Mounts = append(s.Mounts, specs.Mount{Destination: "/x", Type: "bind", Source: "data"})
	dir := bundle(t, s)
	if err := os.Mkdir(filepath.Join(dir, "data"), 0o700); err != nil {
		t.Fatal(err)
	}
	s, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	p, err := Transform(s, defaults())
	if err != nil || len(p.Shares) != 1 || p.Shares[0].Source != filepath.Join(dir, "data") {
		t.Errorf("%+v, %v", p, err)
	}
}
