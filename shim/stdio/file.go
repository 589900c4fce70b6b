package stdio

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/docker/go-units"
	"golang.org/x/sys/unix"
)

// Bounds of what a log's URI may ask for.
const (
	minLogSize      = 4 << 10
	maxLogFiles     = 1000
	defaultLogFiles = 3
)

// maxSlack is how far from its limit a file may end, so that it ends with a line.
const maxSlack = 64 << 10

// logFile is a file that output is appended to. With a limit it is rotated: PATH is the newest, PATH.1 the one before,
// and so on. All of them together are never larger than size × files. Files are renamed, never copied or cut, so that
// readers who have one open see all of it; after PATH has been renamed, the next one is made under that name.
//
// What can't be written is lost, which is logged once, and written again as soon as that works.
type logFile struct {
	path  string
	size  int64 // of one file; 0: no limit
	files int
	log   *slog.Logger

	closed atomic.Bool
	f      atomic.Pointer[os.File] // nil after a failure

	// mu is held while writing: stdout and stderr take turns in one file.
	mu      sync.Mutex
	written int64 // size of f
	atLine  bool  // f ends with a line's end
	failed  bool
}

func openFile(t target, o Owner) (*sink, error) {
	l := &logFile{path: t.path, log: o.Log}
	if err := l.limit(t.query); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(l.path), 0o755); err != nil {
		return nil, err
	}
	f, err := l.file()
	if err != nil {
		return nil, err
	}
	if fi, err := f.Stat(); err == nil && l.size > 0 && !fi.Mode().IsRegular() {
		f.Close()
		return nil, invalid("log %s is not a file that can be rotated: leave out max-size", l.path)
	}
	return &sink{stdout: l, stderr: l, close: l.close}, nil
}

// limit reads the URI's query. Keys of others are ignored, as containerd does.
func (l *logFile) limit(query string) error {
	q, err := url.ParseQuery(query)
	if err != nil {
		return invalid("log %s: query %q: %v", l.path, query, err)
	}
	size, files := q.Get("max-size"), q.Get("max-files")
	if size == "" && files == "" {
		return nil
	}
	if size == "" {
		return invalid("log %s: max-files means nothing without max-size", l.path)
	}
	if l.size, err = units.RAMInBytes(size); err != nil || l.size < minLogSize {
		return invalid("log %s: max-size %q must be a size of at least 4KiB, like 10MiB", l.path, size)
	}
	l.files = defaultLogFiles
	if files != "" {
		if l.files, err = strconv.Atoi(files); err != nil || l.files < 1 || l.files > maxLogFiles {
			return invalid("log %s: max-files %q must be a number from 1 to %d", l.path, files, maxLogFiles)
		}
	}
	return nil
}

// Write never fails before close.
func (l *logFile) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed.Load() {
		return 0, os.ErrClosed
	}
	if err := l.append(p); err != nil && !l.failed && !l.closed.Load() {
		l.failed = true // said no more than once: the guest decides how much it writes
		l.log.Warn("output is lost: its log can't be written", "log", l.path, "error", err)
	}
	return len(p), nil
}

func (l *logFile) append(p []byte) error {
	for len(p) > 0 {
		f, err := l.file()
		if err != nil {
			return err
		}
		n := l.fits(p)
		if n == 0 {
			if err := l.rotate(); err != nil {
				return fmt.Errorf("rotate: %w", err)
			}
			continue
		}
		n, err = f.Write(p[:n])
		l.written += int64(n)
		if err != nil {
			return err
		}
		l.atLine = p[n-1] == '\n'
		p = p[n:]
	}
	return nil
}

// fits returns how much of p goes into the current file; 0 if that one is full.
func (l *logFile) fits(p []byte) int {
	if l.size == 0 {
		return len(p)
	}
	late := l.size - min(maxSlack, l.size/8) // from here on, the next line's end is the file's
	if l.written >= l.size || l.written > late && l.atLine {
		return 0
	}
	n := int(min(int64(len(p)), l.size-l.written))
	if end := bytes.LastIndexByte(p[:n], '\n') + 1; end > 0 && l.written+int64(end) > late {
		return end
	}
	return n
}

// file is the current file.
func (l *logFile) file() (*os.File, error) {
	if f := l.f.Load(); f != nil {
		return f, nil
	}
	// O_NONBLOCK: the path may be a fifo's, and this isn't the place to wait for its reader.
	f, err := os.OpenFile(l.path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|unix.O_CLOEXEC|unix.O_NONBLOCK, 0o644)
	if err != nil {
		return nil, err
	}
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		end = 0 // not a regular file
	}
	l.written, l.atLine = end, true
	l.f.Store(f)
	if l.closed.Load() { // after Store: either we or close see the other
		f.Close()
	}
	return f, nil
}

// rotate moves each file to the next number. The last one goes, or an earlier gap is filled: a shim that was killed
// here has left one.
func (l *logFile) rotate() error {
	l.f.Swap(nil).Close()
	if l.files == 1 {
		return os.Remove(l.path)
	}
	for n := l.files; os.Remove(l.numbered(n)) == nil; n++ {
		// from a time when more were kept
	}
	to := 1
	for to < l.files-1 && exists(l.numbered(to)) {
		to++
	}
	for ; to > 0; to-- {
		if err := os.Rename(l.numbered(to-1), l.numbered(to)); err != nil {
			return err
		}
	}
	return nil
}

func (l *logFile) numbered(n int) string {
	if n == 0 {
		return l.path
	}
	return l.path + "." + strconv.Itoa(n)
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// close doesn't wait for a write that a hung disk holds up.
func (l *logFile) close() {
	l.closed.Store(true)
	if f := l.f.Load(); f != nil {
		f.Close()
	}
}
