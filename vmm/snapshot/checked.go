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

// isChecked tells whether these very files have been checked.
func (r runDir) isChecked(id string, files map[string]identity) bool {
	boot, err := bootID()
	if err != nil {
		return false
	}
	b, err := os.ReadFile(r.path("checked", id))
	var c checked
	return err == nil && json.Unmarshal(b, &c) == nil && c.Boot == boot && maps.Equal(c.Files, files)
}

// setChecked remembers that.
func (r runDir) setChecked(id string, files map[string]identity) error {
	boot, err := bootID()
	if err != nil {
		return err
	}
	b, err := json.Marshal(checked{Boot: boot, Files: files})
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
