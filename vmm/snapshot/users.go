package snapshot

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// maxUser bounds what is read of a file in the runDir.
const maxUser = 64 << 10

// User is somebody who uses a snapshot.
type User struct {
	Name string `json:"name"` // a machine's id
	PID  int    `json:"pid"`  // of the process that made it
}

// Users lists who uses the snapshot of that name, deleted ones included. Whoever has died doesn't.
func (s *Store) Users(id string) ([]User, error) {
	users, err := s.run.users(id)
	if err != nil {
		return nil, fmt.Errorf("who uses snapshot %s: %w", id, err)
	}
	return users, nil
}

// Lingering lists the deleted snapshots that are still in use: their space isn't free.
func (s *Store) Lingering() (map[string][]User, error) {
	ids, err := os.ReadDir(s.run.path("users"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list the users of snapshots: %w", err)
	}
	all := map[string][]User{}
	for _, e := range ids {
		if _, err := os.Lstat(filepath.Join(s.dir, e.Name())); err == nil {
			continue
		}
		users, err := s.Users(e.Name())
		if err != nil {
			return nil, err
		}
		if len(users) > 0 {
			all[e.Name()] = users
		}
	}
	return all, nil
}

// runDir is the directory of what is only true as long as the host and its processes live. A file in it that isn't locked is
// of a process that is gone.
type runDir string

func (r runDir) path(elem ...string) string {
	return filepath.Join(append([]string{string(r)}, elem...)...)
}

// use notes that this process uses a snapshot.
func (r runDir) use(id string, u User) (release func(), err error) {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand)
	return r.hold(filepath.Join("users", id), hex.EncodeToString(b[:]), u)
}

// hold makes a file that is locked, from its first moment on, until release is called or this process is gone.
func (r runDir) hold(dir, name string, note User) (release func(), err error) {
	for {
		release, err = r.tryHold(r.path(dir), name, note)
		if !errors.Is(err, fs.ErrNotExist) { // a sweep has taken the directory, which was empty
			return release, err
		}
	}
}

func (r runDir) tryHold(dir, name string, note User) (release func(), err error) {
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := scratchIn(dir)
	if err != nil {
		return nil, err
	}
	err = json.NewEncoder(f).Encode(note)
	if err == nil {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if err == nil {
		err = unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", f.Fd()), unix.AT_FDCWD, path, unix.AT_SYMLINK_FOLLOW)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make %s: %w", path, err), f.Close())
	}
	return func() {
		_ = os.Remove(path) // what is left isn't locked, and goes with the next look at it
		_ = f.Close()
	}, nil
}

// scratchIn makes a file without a name in a directory.
func scratchIn(dir string) (*os.File, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	f, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", d.Fd()), os.O_RDWR|unix.O_TMPFILE, 0o600)
	if err == nil {
		return f, nil
	}
	var st unix.Stat_t
	if unix.Fstat(int(d.Fd()), &st) == nil && st.Nlink == 0 { // ext4 says EPERM of a directory that has been removed
		return nil, fs.ErrNotExist
	}
	return nil, fmt.Errorf("make a file in %s: %w", dir, err)
}

// held tells whether the process that made the file lives, and removes it if not.
func (r runDir) held(dir, name string) bool {
	_, ok := r.note(dir, name)
	return ok
}

func (r runDir) note(dir, name string) (u User, held bool) {
	path := r.path(dir, name)
	f, err := os.Open(path)
	if err != nil {
		return u, false
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); err == nil {
		_ = os.Remove(path) // no name is used twice
		return u, false
	}
	b, err := io.ReadAll(io.LimitReader(f, maxUser))
	if err == nil {
		_ = json.Unmarshal(b, &u) // held it is, whatever it says
	}
	return u, true
}

func (r runDir) users(id string) ([]User, error) {
	entries, err := os.ReadDir(r.path("users", id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var all []User
	for _, e := range entries {
		if u, ok := r.note(filepath.Join("users", id), e.Name()); ok {
			all = append(all, u)
		}
	}
	slices.SortFunc(all, func(a, b User) int { return bytes.Compare([]byte(a.Name), []byte(b.Name)) })
	return all, nil
}

// sweep forgets snapshots that are no more and that nobody uses.
func (r runDir) sweep(exists func(id string) bool) error {
	var errs []error
	for _, dir := range []string{"checked", "users"} {
		entries, err := os.ReadDir(r.path(dir))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		for _, e := range entries {
			if exists(e.Name()) {
				continue
			}
			if users, err := r.users(e.Name()); err != nil || len(users) > 0 {
				errs = append(errs, err)
				continue
			}
			err := os.Remove(r.path(dir, e.Name()))
			if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}
