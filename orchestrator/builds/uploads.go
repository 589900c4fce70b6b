package builds

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/orchestrator/templates"
)

// Uploads are files that clients have uploaded for steps of builds: gzipped tars, each by its team and the sum that the client calls
// it by, which says nothing of what is in it. All methods may be called from many goroutines.
//
// A file is DIR/TEAM/SUM.RANDOM: whole, or DIR/TEAM/.SUM.RANDOM while it is uploaded.
type Uploads struct {
	dir        string
	each, most int64 // bytes

	mu   sync.Mutex // not held over I/O
	all  map[upload]*kept
	used int64 // bytes of all, and of what is being uploaded
}

// upload is what a file is called by.
type upload struct{ team, sum string }

// kept is a file.
type kept struct {
	path string
	size int64
	used time.Time
	pins int // by how many builds it is needed
}

// OpenUploads finds the uploads below a directory, which is made if there is none. each and most bound what one and all of them take,
// in bytes: those that were used least recently go when there is no room. What wasn't uploaded whole is removed.
func OpenUploads(dir string, each, most int64) (*Uploads, error) {
	u := &Uploads{dir: dir, each: each, most: most, all: map[upload]*kept{}}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("uploads: %w", err)
	}
	var stale []string
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		sum, _, _ := strings.Cut(e.Name(), ".")
		team := filepath.Dir(path)
		if !templates.ValidSum(sum) || filepath.Dir(team) != dir {
			stale = append(stale, path)
			return nil
		}
		id := upload{filepath.Base(team), sum}
		if was := u.all[id]; was != nil { // it has been replaced
			if info.ModTime().Before(was.used) {
				stale = append(stale, path)
				return nil
			}
			stale = append(stale, was.path)
			u.used -= was.size
		}
		u.all[id] = &kept{path: path, size: info.Size(), used: info.ModTime()}
		u.used += info.Size()
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("uploads: %w", err)
	}
	u.mu.Lock()
	stale = append(stale, u.evict(0)...)
	u.mu.Unlock()
	return u, remove(stale)
}

// teamDir is where a team's files are.
func (u *Uploads) teamDir(team string) string { return filepath.Join(u.dir, team) }

// expect has a team upload files, until removeAll: what has begun before that and comes after it isn't kept.
func (u *Uploads) expect(team string) error {
	if err := os.Mkdir(u.teamDir(team), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("uploads: %w", err)
	}
	return nil
}

func remove(paths []string) error {
	var errs []error
	for _, p := range paths {
		if err := os.Remove(p); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// evict takes what was used least recently out of those that are kept, until there is room for more bytes or nothing is left that
// can go, and returns the files. mu is held.
func (u *Uploads) evict(more int64) (paths []string) {
	if u.used+more <= u.most {
		return nil
	}
	var ids []upload
	for id, k := range u.all {
		if k.pins == 0 {
			ids = append(ids, id)
		}
	}
	slices.SortFunc(ids, func(a, b upload) int {
		return cmp.Or(u.all[a].used.Compare(u.all[b].used), cmp.Compare(a.sum, b.sum))
	})
	for _, id := range ids {
		if u.used+more <= u.most {
			break
		}
		paths = append(paths, u.all[id].path)
		u.used -= u.all[id].size
		delete(u.all, id)
	}
	return paths
}

// Has tells whether there is a file.
func (u *Uploads) Has(team, sum string) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.all[upload{team, sum}] != nil
}

// Open opens a team's file: templates.Files.
func (u *Uploads) Open(_ context.Context, team, sum string) (io.ReadCloser, error) {
	for {
		now := time.Now()
		path := ""
		u.mu.Lock()
		if k := u.all[upload{team, sum}]; k != nil {
			path, k.used = k.path, now
		}
		u.mu.Unlock()
		if path == "" {
			return nil, errdefs.ErrNotFound.WithMessage("the files " + sum + " aren't here any more: upload them again")
		}
		f, err := os.Open(path)
		if errors.Is(err, fs.ErrNotExist) && u.moved(team, sum, path) {
			continue // it was replaced meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("uploads: %w", err)
		}
		_ = os.Chtimes(path, now, now) // it counts as used from the next start on, too
		return f, nil
	}
}

// moved tells whether a file isn't at a path any more.
func (u *Uploads) moved(team, sum, path string) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	k := u.all[upload{team, sum}]
	return k == nil || k.path != path
}

// pin has files stay until release is called; missing is one that isn't there.
func (u *Uploads) pin(team string, sums []string) (release func(), missing string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	var pinned []*kept
	for _, sum := range sums {
		k := u.all[upload{team, sum}]
		if k == nil {
			missing = sum
			break
		}
		k.pins++
		pinned = append(pinned, k)
	}
	unpin := func() {
		for _, k := range pinned {
			k.pins--
		}
	}
	if missing != "" {
		unpin()
		return nil, missing
	}
	return sync.OnceFunc(func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		unpin()
	}), ""
}

// Put keeps what a client uploads, of that size, -1 if it doesn't say, in the place of what it has uploaded by the same sum. A tar
// that isn't gzipped is gzipped. What is neither is errdefs.ErrInvalidArgument, what is too large errdefs.ErrOutOfRange; without room
// it is errdefs.ErrUnavailable. After an error there is what there was.
func (u *Uploads) Put(ctx context.Context, team, sum string, body io.Reader, size int64) (err error) {
	if size > u.each {
		return u.large()
	}
	need := size
	if size < 0 {
		need = u.each
	}
	u.mu.Lock()
	stale := u.evict(need)
	room := u.used+need <= u.most
	if room {
		u.used += need
	}
	u.mu.Unlock()
	defer func() {
		err = errors.Join(err, remove(stale))
		if errors.Is(err, unix.ENOSPC) {
			err = errdefs.ErrUnavailable.WithMessage("this host has no space for uploads: " + err.Error())
		}
	}()
	if !room {
		return errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("uploads take %s, which is all that they may, and builds under way need them: try again when those are done, or raise templates.uploads", units.BytesSize(float64(u.most))))
	}
	path, took, err := u.write(ctx, team, sum, body)
	id := upload{team, sum}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.used -= need
	if err != nil {
		return err
	}
	k := &kept{path: path, size: took, used: time.Now()}
	if was := u.all[id]; was != nil {
		stale = append(stale, was.path)
		u.used -= was.size
		k.pins = was.pins
		// Who has it pinned lets the new one go.
		was.path, was.size, was.used = k.path, k.size, k.used
		k = was
	}
	u.all[id] = k
	u.used += took
	return nil
}

func (u *Uploads) large() error {
	return errdefs.ErrOutOfRange.WithMessage(fmt.Sprintf("an upload may have %s (templates.max_upload)", units.BytesSize(float64(u.each))))
}

// write writes an upload to a file.
func (u *Uploads) write(ctx context.Context, team, sum string, body io.Reader) (path string, size int64, err error) {
	dir := u.teamDir(team)
	failed := func(err error) (string, int64, error) {
		if errors.Is(err, fs.ErrNotExist) {
			return "", 0, errdefs.ErrNotFound.WithMessage("all that team " + team + " has uploaded was removed: ask for a link again")
		}
		return "", 0, fmt.Errorf("uploads: %w", err)
	}
	f, err := os.CreateTemp(dir, "."+sum+".*") // mode 0600
	if err != nil {
		return failed(err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close(), remove([]string{f.Name()}))
		}
	}()
	limited, out := &atMost{r: body, left: u.each}, &file{File: f}
	err = pack(out, limited, maxRatio*u.each)
	switch {
	case limited.left < 0:
		err = u.large()
	case out.err != nil:
		err = fmt.Errorf("uploads: %w", out.err)
	case limited.err != nil:
		err = errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("the upload didn't come whole: %v", limited.err))
	case err == nil:
		err = context.Cause(ctx)
	}
	if err != nil {
		return "", 0, err
	}
	info, err := f.Stat()
	if err = errors.Join(err, f.Sync()); err != nil {
		return failed(err)
	}
	path = filepath.Join(dir, strings.TrimPrefix(filepath.Base(f.Name()), "."))
	if err := os.Rename(f.Name(), path); err != nil {
		return failed(err)
	}
	return path, info.Size(), f.Close()
}

// atMost reads as many bytes; left is negative when there are more. err is what reading has failed with.
type atMost struct {
	r    io.Reader
	left int64
	err  error
}

func (a *atMost) Read(p []byte) (int, error) {
	n, err := a.r.Read(p[:min(int64(len(p)), a.left+1)])
	if a.left -= int64(n); a.left < 0 {
		return n, io.ErrUnexpectedEOF
	}
	if err != nil && err != io.EOF {
		a.err = err
	}
	return n, err
}

// file remembers what writing has failed with.
type file struct {
	*os.File
	err error
}

func (f *file) Write(b []byte) (int, error) {
	n, err := f.File.Write(b)
	if err != nil {
		f.err = err
	}
	return n, err
}
