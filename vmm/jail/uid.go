package jail

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/process"
	"golang.org/x/sys/unix"
)

// ErrNoUID says that every uid of the configured range is in use.
var ErrNoUID = errors.New("all uids for machines are in use")

// UIDs hands out the host uids that machines run under, to all launching processes of the host. A uid is taken as long
// as a file of its name exists.
type UIDs struct {
	dir         string
	base, count uint32
}

// lock is the content of such a file.
type lock struct {
	Owner process.ID `json:"owner"` // the launching process
	Dir   string     `json:"dir"`   // the machine's
}

// NewUIDs uses the range that is configured.
func NewUIDs(cfg *config.Config) *UIDs {
	return &UIDs{dir: filepath.Join(cfg.RunDir, "uids"), base: cfg.VM.UIDBase, count: cfg.VM.UIDCount}
}

// Take finds a free uid for the machine in dir. claim is called with each candidate before it is taken; its error ends
// the search.
func (u *UIDs) Take(dir string, claim func(uid uint32) error) (uint32, error) {
	self, err := process.Self()
	if err != nil {
		return 0, err
	}
	if err := os.MkdirAll(u.dir, 0o700); err != nil {
		return 0, fmt.Errorf("take a uid: %w", err)
	}
	b, err := json.Marshal(lock{Owner: self, Dir: dir})
	if err != nil {
		return 0, err
	}
	// The file appears with its content, so that nobody takes an empty one for a leftover.
	tmp, err := os.CreateTemp(u.dir, ".take-*")
	if err != nil {
		return 0, fmt.Errorf("take a uid: %w", err)
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(b)
	if err := errors.Join(err, tmp.Close()); err != nil {
		return 0, fmt.Errorf("take a uid: %w", err)
	}
	for attempt := range 2 {
		if attempt > 0 && u.Sweep() == 0 {
			break
		}
		first := rand.Uint32N(u.count)
		for i := range u.count {
			uid := u.base + (first+i)%u.count
			if _, err := os.Lstat(u.path(uid)); err == nil {
				continue
			}
			if err := claim(uid); err != nil {
				return 0, err
			}
			switch err := os.Link(tmp.Name(), u.path(uid)); {
			case err == nil:
				return uid, nil
			case !errors.Is(err, fs.ErrExist):
				return 0, fmt.Errorf("take a uid: %w", err)
			}
		}
	}
	return 0, fmt.Errorf("%w (%d from %d on); raise vm.uid_count", ErrNoUID, u.count, u.base)
}

// Release gives a uid back. Not taken, or by another machine, is no error: it may be called again after a crash.
func (u *UIDs) Release(uid uint32, dir string) error {
	unlock, err := u.lock()
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("release uid %d: %w", uid, err)
	}
	defer unlock()
	l, err := u.read(u.path(uid))
	if errors.Is(err, fs.ErrNotExist) || err == nil && l.Dir != dir {
		return nil
	}
	if err == nil {
		err = os.Remove(u.path(uid))
	}
	if err != nil {
		return fmt.Errorf("release uid %d: %w", uid, err)
	}
	return nil
}

// lock keeps others from removing files between a look at one and its removal. Taking needs no lock.
func (u *UIDs) lock() (unlock func(), err error) {
	d, err := os.Open(u.dir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(d.Fd()), unix.LOCK_EX); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return func() { _ = d.Close() }, nil
}

func (u *UIDs) path(uid uint32) string {
	return filepath.Join(u.dir, strconv.FormatUint(uint64(uid), 10))
}

func (u *UIDs) read(path string) (lock, error) {
	var l lock
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, &l)
	}
	return l, err
}

// Taken is a uid that is taken.
type Taken struct {
	UID   uint32
	Owner process.ID // the launching process
	Dir   string     // what it was taken for
	Since time.Time
}

// Taken lists the uids that are taken. Those whose records can't be read aren't among them.
func (u *UIDs) Taken() ([]Taken, error) {
	entries, err := os.ReadDir(u.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list uids: %w", err)
	}
	var all []Taken
	for _, e := range entries {
		uid, err := strconv.ParseUint(e.Name(), 10, 32)
		if err != nil {
			continue
		}
		l, err := u.read(u.path(uint32(uid)))
		if err != nil {
			continue
		}
		t := Taken{UID: uint32(uid), Owner: l.Owner, Dir: l.Dir}
		if info, err := e.Info(); err == nil {
			t.Since = info.ModTime()
		}
		all = append(all, t)
	}
	return all, nil
}

// Sweep gives back what dead launching processes hold, and counts it. A uid under which anything still runs stays
// taken.
func (u *UIDs) Sweep() (n int) {
	unlock, err := u.lock()
	if err != nil {
		return 0
	}
	defer unlock()
	all, err := u.Taken()
	if err != nil {
		return 0
	}
	var busy map[uint32]bool
	for _, t := range all {
		if t.Owner.Alive() {
			continue
		}
		if busy == nil {
			busy = uidsInUse()
		}
		if !busy[t.UID] && os.Remove(u.path(t.UID)) == nil {
			n++
		}
	}
	return n
}

// uidsInUse lists the uids of all processes.
func uidsInUse() map[uint32]bool {
	used := make(map[uint32]bool)
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return used
	}
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		var st unix.Stat_t
		if unix.Stat(filepath.Join("/proc", e.Name()), &st) == nil {
			used[st.Uid] = true
		}
	}
	return used
}
