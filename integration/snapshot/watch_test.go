package snapshot

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// watcher tells of the files that appear in a directory, from its making on, and of those that were there.
type watcher struct {
	*testing.T
	dir   string
	f     *os.File
	names []string
}

func watch(t *testing.T, dir string) *watcher {
	t.Helper()
	must(t, os.MkdirAll(dir, 0o700))
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	must(t, err)
	w := &watcher{T: t, dir: dir, f: os.NewFile(uintptr(fd), "inotify")}
	t.Cleanup(func() { w.f.Close() })
	_, err = unix.InotifyAddWatch(fd, dir, unix.IN_CREATE|unix.IN_MOVED_TO)
	must(t, err)
	before, err := filepath.Glob(filepath.Join(dir, "*"))
	must(t, err)
	for _, path := range before {
		w.names = append(w.names, filepath.Base(path))
	}
	return w
}

// await waits for a file whose name begins so, and returns the name.
func (w *watcher) await(prefix string) string {
	w.Helper()
	must(w, w.f.SetReadDeadline(time.Now().Add(s.Config.Timeout(30*time.Second))))
	b := make([]byte, 4096)
	for {
		for len(w.names) > 0 {
			name := w.names[0]
			w.names = w.names[1:]
			if strings.HasPrefix(name, prefix) {
				return name
			}
		}
		n, err := w.f.Read(b)
		if err != nil {
			w.Fatalf("wait for %s in %s: %v", prefix, w.dir, err)
		}
		for rest := b[:n]; len(rest) >= unix.SizeofInotifyEvent; {
			e := (*unix.InotifyEvent)(unsafe.Pointer(&rest[0]))
			end := unix.SizeofInotifyEvent + int(e.Len)
			w.names = append(w.names, string(bytes.TrimRight(rest[unix.SizeofInotifyEvent:end], "\x00")))
			rest = rest[end:]
		}
	}
}

// killShim kills the container's shim, and nothing else.
func (b *box) killShim() {
	b.Helper()
	for _, p := range s.Processes("containerd-shim-cube-v2") {
		if strings.Contains(p.Command, "-id "+b.id+" ") {
			s.End(b, p.PID, unix.SIGKILL)
			return
		}
	}
	b.Fatal("it has no shim")
}
