package dns

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/fsnotify/fsnotify"
)

// Limits of resolv.conf. The C library takes three name servers; more than that may be in there.
const (
	maxResolvConf = 64 << 10
	maxServers    = 8
)

// watch follows a resolv.conf.
type watch struct {
	file    string
	changed func([]netip.AddrPort)
	log     *slog.Logger
	events  *fsnotify.Watcher
	dirs    []string
}

// newWatch reads the file, and watches it before, so that no change is missed.
func newWatch(file string, changed func([]netip.AddrPort), log *slog.Logger) (*watch, error) {
	events, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("watch %s: %w", file, err)
	}
	w := &watch{file: filepath.Clean(file), changed: changed, log: log, events: events}
	if err := w.update(); err != nil {
		return nil, errors.Join(err, events.Close())
	}
	return w, nil
}

func (w *watch) close() error {
	if w == nil {
		return nil
	}
	return w.events.Close()
}

// run follows the file until ctx ends.
func (w *watch) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case _, ok := <-w.events.Events:
			if !ok {
				return nil
			}
		case err, ok := <-w.events.Errors:
			if !ok {
				return nil
			}
			w.log.Warn("changes of the host's name servers may have been missed", "file", w.file, "error", err)
		}
		if err := w.update(); err != nil {
			w.log.Warn("the host's name servers can't be followed before they change again", "error", err)
		}
	}
}

// update watches where the file is, as a link and as what it leads to, and reads it. While it can't be read, the name
// servers stay those that there were: whoever writes it may be in the middle of that.
func (w *watch) update() error {
	dirs := []string{filepath.Dir(w.file)}
	if d := targetDir(w.file); !slices.Contains(dirs, d) {
		dirs = append(dirs, d)
	}
	for _, d := range dirs {
		if err := w.events.Add(d); err != nil {
			return fmt.Errorf("watch %s: %w", d, err)
		}
	}
	for _, d := range w.dirs {
		if !slices.Contains(dirs, d) {
			_ = w.events.Remove(d) // it may have gone
		}
	}
	w.dirs = dirs
	f, err := os.Open(w.file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		w.log.Warn("the host's name servers can't be read", "error", err)
		return nil
	}
	defer f.Close()
	if list := parse(io.LimitReader(f, maxResolvConf)); len(list) > 0 {
		w.changed(list)
	}
	return nil
}

// targetDir is the directory of what a link leads to, or the nearest one to it that is there: the rest may come, as it does
// when the host boots.
func targetDir(file string) string {
	target, err := filepath.EvalSymlinks(file)
	if err == nil {
		return filepath.Dir(target)
	}
	to, err := os.Readlink(file)
	if err != nil {
		return filepath.Dir(file)
	}
	if !filepath.IsAbs(to) {
		to = filepath.Join(filepath.Dir(file), to)
	}
	d := filepath.Dir(to)
	for {
		if _, err := os.Stat(d); err == nil || d == "/" {
			return d
		}
		d = filepath.Dir(d)
	}
}

// parse takes the name servers out of a resolv.conf, resolv.conf(5), and passes over what it can't read.
func parse(r io.Reader) (list []netip.AddrPort) {
	lines := bufio.NewScanner(r)
	for lines.Scan() && len(list) < maxServers {
		words := strings.Fields(lines.Text())
		if len(words) < 2 || words[0] != "nameserver" {
			continue
		}
		if a, err := netip.ParseAddr(words[1]); err == nil && !a.IsUnspecified() {
			list = append(list, netip.AddrPortFrom(a, 53))
		}
	}
	return list
}
