package share_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/process"
	"github.com/cubesandbox/cube/shim/share"
	"github.com/cubesandbox/cube/shim/share/internal/client"
	"github.com/cubesandbox/cube/shim/spec"
	"github.com/cubesandbox/cube/vmm/cgroup"
)

var bin struct {
	sync.Once
	dir string
	err error
}

func TestMain(m *testing.M) {
	if os.Getenv(ownerEnv) != "" {
		os.Exit(owner())
	}
	code := m.Run()
	if bin.dir != "" {
		_ = os.RemoveAll(bin.dir)
	}
	os.Exit(code)
}

// host is a configuration with the binaries of this tree and directories of the test's own.
func host(t testing.TB) *config.Config {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	bin.Do(func() {
		if bin.dir, bin.err = os.MkdirTemp("", "cube-share-test-"); bin.err != nil {
			return
		}
		cmd := exec.Command("go", "build", "-o", bin.dir, "github.com/cubesandbox/cube/cmd/cube-jail", "github.com/cubesandbox/cube/cmd/cube-share")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			bin.err = fmt.Errorf("%w: %s", err, out)
		}
	})
	if bin.err != nil {
		t.Fatal(bin.err)
	}
	cfg := config.Default()
	cfg.RunDir, cfg.BinDir, cfg.TimeoutScale = t.TempDir(), bin.dir, 5
	return cfg
}

// recorder keeps the last record, as a bundle's state would.
type recorder struct {
	all []share.Record
}

func (r *recorder) last() share.Record { return r.all[len(r.all)-1] }

func configFor(t testing.TB, cfg *config.Config, r *recorder, shares ...spec.Share) share.Config {
	return share.Config{
		Host: cfg, ID: "test-" + strconv.Itoa(os.Getpid()), Dir: t.TempDir(), Shares: shares, Memory: 64 << 20, Log: slog.Default(),
		Record: func(rec share.Record) error { r.all = append(r.all, rec); return nil },
	}
}

// start runs a helper until the test's end, and checks that nothing is left of it.
func start(t testing.TB, shares ...spec.Share) *share.Server {
	t.Helper()
	cfg, r := host(t), &recorder{}
	s, err := share.Start(within(t, cfg, 20*time.Second), configFor(t, cfg, r, shares...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for range 2 {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		}
		nothingLeft(t, cfg, r.last())
	})
	return s
}

func within(t testing.TB, cfg *config.Config, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), cfg.Timeout(d))
	t.Cleanup(cancel)
	return ctx
}

func nothingLeft(t testing.TB, cfg *config.Config, r share.Record) {
	t.Helper()
	if r.Helper.Alive() {
		t.Error("the helper lives")
	}
	if cgroup.Exists(r.Cgroup) {
		t.Errorf("cgroup %s is left", r.Cgroup)
	}
	if _, err := os.Lstat(filepath.Join(cfg.RunDir, "uids", strconv.Itoa(int(r.UID)))); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("uid %d is taken: %v", r.UID, err)
	}
}

// connect is a session with one of the shares, as a user.
func connect(t testing.TB, conn net.Conn, uid uint32) (*client.Client, uint32) {
	t.Helper()
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	c, err := client.New(conn)
	if err != nil {
		t.Fatal(err)
	}
	root, err := c.Root(uid)
	if err != nil {
		t.Fatal(err)
	}
	return c, root
}

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func wants(t testing.TB, what string, got error, want unix.Errno) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

// A directory and a file of another user, read-write and read-only, from two connections.
func TestShares(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "theirs")
	if err := errors.Join(os.WriteFile(file, []byte("hello"), 0o600), os.Chown(file, 1234, 1234), os.Mkdir(filepath.Join(dir, "sub"), 0o700)); err != nil {
		t.Fatal(err)
	}
	s := start(t, spec.Share{Source: dir}, spec.Share{Source: file}, spec.Share{Source: dir, ReadOnly: true})
	if got := s.Files(); !slices.Equal(got, []string{"", share.FileName, ""}) {
		t.Errorf("files %q", got)
	}

	c, root := connect(t, s.Conns()[0], 1000)
	f := must(c.Create(root, "mine", unix.O_RDWR, 0o640, 100))(t)
	if n, err := c.Write(f, 0, []byte("made by 1000")); err != nil || n != 12 {
		t.Fatal(n, err)
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(dir, "mine"), &st); err != nil || st.Uid != 1000 || st.Gid != 100 || st.Mode != unix.S_IFREG|0o640 || st.Size != 12 {
		t.Errorf("on the host: %+v, %v", st, err)
	}
	f = must(c.Open(root, unix.O_RDWR, "theirs"))(t)
	if b, err := c.Read(f, 1, 100); err != nil || string(b) != "ello" {
		t.Errorf("%q, %v", b, err)
	}

	c, root = connect(t, s.Conns()[1], 0)
	d := must(c.Open(root, unix.O_RDONLY))(t)
	if names := must(c.Names(d, 4096))(t); strings.Join(names, " ") != ". .. "+share.FileName && strings.Join(names, " ") != share.FileName+" . .." {
		t.Errorf("the share of a file has %q", names)
	}
	_, err := c.Create(root, "more", unix.O_RDWR, 0o600, 0)
	wants(t, "create beside a file", err, unix.EROFS)
	f = must(c.Open(root, unix.O_WRONLY, share.FileName))(t)
	if _, err := c.Write(f, 0, []byte("J")); err != nil {
		t.Error(err)
	}
	if b, err := os.ReadFile(file); err != nil || string(b) != "Jello" {
		t.Errorf("%q, %v", b, err)
	}

	c, root = connect(t, s.Conns()[2], 0)
	f = must(c.Walk(root, "theirs"))(t)
	_, err = c.Do(client.Lopen, f, uint32(unix.O_WRONLY))
	wants(t, "open for writing", err, unix.EROFS)
	_, err = c.Create(root, "more", unix.O_RDWR, 0o600, 0)
	wants(t, "create", err, unix.EROFS)
	_, err = c.Do(client.Unlinkat, root, "theirs", uint32(0))
	wants(t, "unlink", err, unix.EROFS)
	wants(t, "chmod", c.Set(f, client.SetMode, 0o666, 0, 0, 0), unix.EROFS)
	wants(t, "chown", c.Set(f, client.SetUID, 0, 5, 0, 0), unix.EROFS)
}

// What is mounted below a source comes along if that is wanted, read-only if all is; the kernel's interfaces never do.
func TestSubmounts(t *testing.T) {
	host(t)
	dir := t.TempDir()
	for _, m := range []struct{ name, kind string }{{"data", "tmpfs"}, {"proc", "proc"}, {"data/sys", "sysfs"}, {"dev", "devtmpfs"}} {
		point := filepath.Join(dir, m.name)
		if err := errors.Join(os.Mkdir(point, 0o755), unix.Mount(m.kind, point, m.kind, 0, "")); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(point, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		})
		if err := os.WriteFile(filepath.Join(dir, "data/x"), []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	s := start(t, spec.Share{Source: dir}, spec.Share{Source: dir, Recursive: true}, spec.Share{Source: dir, Recursive: true, ReadOnly: true})
	for i, tc := range []struct{ below, write bool }{{false, false}, {true, true}, {true, false}} {
		c, root := connect(t, s.Conns()[i], 0)
		_, err := c.Walk(root, "data", "x")
		if (err == nil) != tc.below {
			t.Errorf("share %d: data/x: %v", i, err)
		}
		for _, path := range [][]string{{"proc"}, {"data", "sys"}, {"dev"}} {
			f, err := c.Open(root, unix.O_RDONLY, path...)
			if !tc.below && path[0] == "data" {
				continue
			}
			if names, err := c.Names(f, 4096); err != nil || len(names) != 2 {
				t.Errorf("share %d: %s has %q, %v", i, path, names, err)
			}
			if err != nil {
				t.Error(err)
			}
		}
		if !tc.below {
			continue
		}
		if d, err := c.Walk(root, "data"); err != nil {
			t.Error(err)
		} else if _, err = c.Create(d, "y"+strconv.Itoa(i), unix.O_WRONLY, 0o600, 0); (err == nil) != tc.write {
			t.Errorf("share %d: create below: %v", i, err)
		}
	}
}

// A source that is swapped after the start, or a mount over it, changes nothing.
func TestSwappedSource(t *testing.T) {
	dir := t.TempDir()
	source := filepath.Join(dir, "source")
	if err := errors.Join(os.Mkdir(source, 0o755), os.WriteFile(filepath.Join(source, "right"), nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	s := start(t, spec.Share{Source: source})
	if err := errors.Join(os.Rename(source, source+".old"), os.Symlink("/etc", source)); err != nil {
		t.Fatal(err)
	}
	c, root := connect(t, s.Conns()[0], 0)
	if _, err := c.Walk(root, "right"); err != nil {
		t.Error(err)
	}
	_, err := c.Walk(root, "passwd")
	wants(t, "/etc/passwd", err, unix.ENOENT)
}

func TestStartFails(t *testing.T) {
	cfg := host(t)
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	dir := spec.Share{Source: t.TempDir()}
	for name, tc := range map[string]struct {
		shares []spec.Share
		spoil  func(*share.Config)
		want   string
	}{
		"nothing to share":    {nil, nil, "0 bind mounts"},
		"too much":            {make([]spec.Share, share.MaxShares+1), nil, "a container may have 64"},
		"missing":             {[]spec.Share{dir, {Source: "/nonexistent"}}, nil, "bind mount of /nonexistent"},
		"a fifo":              {[]spec.Share{{Source: fifo}}, nil, "only files and directories"},
		"a device":            {[]spec.Share{{Source: "/dev/null"}}, nil, "only files and directories"},
		"/proc":               {[]spec.Share{{Source: "/proc"}}, nil, "/0 is of type proc"},
		"no helper":           {[]spec.Share{dir}, func(c *share.Config) { h := *c.Host; h.BinDir = t.TempDir(); c.Host = &h }, "cube-share is missing"},
		"no record":           {[]spec.Share{dir}, func(c *share.Config) { c.Record = func(share.Record) error { return os.ErrPermission } }, "permission denied"},
		"no record of helper": {[]spec.Share{dir}, refuseHelper, "refused by the test"},
	} {
		t.Run(name, func(t *testing.T) {
			r := &recorder{}
			c := configFor(t, cfg, r, tc.shares...)
			if tc.spoil != nil {
				tc.spoil(&c)
			}
			s, err := share.Start(within(t, cfg, 20*time.Second), c)
			if err == nil {
				_ = s.Close()
			}
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v, want %q", err, tc.want)
			}
			if len(r.all) > 0 {
				nothingLeft(t, cfg, r.last())
			}
		})
	}
}

func refuseHelper(c *share.Config) {
	record := c.Record
	c.Record = func(r share.Record) error {
		if r.Helper != (process.ID{}) {
			return errors.New("refused by the test")
		}
		return record(r)
	}
}
