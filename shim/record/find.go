package record

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cubesandbox/cube/internal/process"
)

// Pods lists the pods whose directories are in dir.
func Pods(dir string) ([]Pod, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list pods: %w", err)
	}
	var pods []Pod
	for _, e := range entries {
		pods = append(pods, Pod(filepath.Join(dir, e.Name())))
	}
	return pods, nil
}

// Shim is the pod's living shim; the zero value when there is none. The caller has the pod's lock, so that nobody takes
// the look for a living shim.
func (p Pod) Shim() (process.ID, error) {
	if _, err := os.Stat(p.pidFile()); errors.Is(err, fs.ErrNotExist) {
		return process.ID{}, nil
	}
	lock, err := p.LockShim()
	if err == nil {
		return process.ID{}, lock.Close()
	}
	if !errors.Is(err, ErrAlive) {
		return process.ID{}, err
	}
	b, err := os.ReadFile(p.pidFile())
	if err != nil {
		return process.ID{}, err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return process.ID{}, fmt.Errorf("the pid file of a pod's shim says %q", b)
	}
	return process.Of(pid)
}
