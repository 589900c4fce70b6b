package snapshot

import (
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// checked are the files of a snapshot that have been read and found right, in this boot of the host. One that has been
// written to since is another.
type checked struct {
	Boot  string              `json:"boot"`
	Files map[string]identity `json:"files"`
}

// identity changes with the content of a file.
type identity struct {
	Ino   uint64
	Size  int64
	Ctime unix.Timespec
}

func identify(f *os.File) (identity, error) {
	var st unix.Stat_t
	err := unix.Fstat(int(f.Fd()), &st)
	return identity{Ino: st.Ino, Size: st.Size, Ctime: st.Ctim}, err
}

func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b)), err
}

// readChecked reads what is remembered of a snapshot in this boot.
func (r runDir) readChecked(id string) (c checked, err error) {
	boot, err := bootID()
	if err != nil {
		return c, err
	}
	b, err := os.ReadFile(r.path("checked", id))
	if err != nil || json.Unmarshal(b, &c) != nil || c.Boot != boot || c.Files == nil {
		c = checked{Boot: boot, Files: map[string]identity{}}
	}
	return c, nil
}

// isChecked tells whether this very file has been checked.
func (r runDir) isChecked(id, name string, f *os.File) bool {
	c, err := r.readChecked(id)
	if err != nil {
		return false
	}
	have, err := identify(f)
	return err == nil && c.Files[name] == have
}

// setChecked remembers files that have been checked.
func (s *Store) setChecked(id string, files map[string]identity) {
	if err := s.run.setChecked(id, files); err != nil { // as after a sweep at the wrong moment
		s.log.Debug("what has been checked will be checked once more", "id", id, "err", err)
	}
}

// setChecked remembers files. Of two who do that at once, one may be forgotten: its files are checked once more.
func (r runDir) setChecked(id string, files map[string]identity) error {
	c, err := r.readChecked(id)
	if err != nil {
		return err
	}
	maps.Copy(c.Files, files)
	b, err := json.Marshal(c)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(r.path("checked"), 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(r.path("checked"), ".tmp-")
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), r.path("checked", id))
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

// forget is for a snapshot that is deleted.
func (r runDir) forget(id string) error {
	err := os.Remove(filepath.Join(r.path("checked"), id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
