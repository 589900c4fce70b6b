package base

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/memory"
)

// The files of a snapshot.
const (
	stateFile  = "state"  // devices and CPUs
	memoryFile = "memory" // all of the guest's memory, sparse
	descFile   = "snapshot.json"
)

const (
	// maxState bounds what is read of a state file; it has about 16 KiB.
	maxState = 16 << 20
	// maxDesc bounds what is read of a description, which has 54 bytes for each MiB of memory that isn't zero.
	maxDesc = 64 << 20
	// tscTolerance is how far the host's counter may be from that of the host the guest was saved on, in parts per
	// million: what NTP can make up for (adjtimex(2) takes 500).
	tscTolerance = 250
)

// errUnusable says that a snapshot is missing, damaged or not for this host; another one must be made.
var errUnusable = errors.New("unusable base snapshot")

var digestForm = regexp.MustCompile(`^[0-9a-f]{64}$`)

// description is what a snapshot says about itself.
type description struct {
	Key    Key      `json:"key"`
	TSCKHz int      `json:"tsc_khz"`
	State  stateOf  `json:"state"`
	Memory memoryOf `json:"memory"`
}

type stateOf struct {
	Size   int64  `json:"size"`
	Digest string `json:"digest"` // SHA-256
}

type memoryOf struct {
	Size    int64          `json:"size"`
	Digests memory.Digests `json:"digests"`
}

// stored is a base snapshot that is open. Its files stay readable whatever becomes of the directory.
type stored struct {
	description
	state, memory *os.File
}

// platform is what a machine restored from it is made of.
func (s *stored) platform() vmm.Platform {
	return vmm.Platform{Board: s.Key.Board, QEMU: s.Key.QEMU, Guest: s.Key.Guest, Accel: string(s.Key.Accel), CPU: s.Key.CPU, TSCKHz: s.TSCKHz}
}

func (s *stored) Close() {
	_ = s.state.Close()
	_ = s.memory.Close()
}

// open opens the snapshot in dir and checks all but the memory's content, which whoever copies it does. An error that
// wraps errUnusable says why another must be made.
func open(dir string, key Key, tscKHz int) (_ *stored, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w: %w", errUnusable, err)
		}
	}()
	s := &stored{}
	b, err := readBounded(filepath.Join(dir, descFile), maxDesc)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(b, &s.description); err != nil {
		return nil, fmt.Errorf("%s: %w", descFile, err)
	}
	if s.Key != key {
		return nil, fmt.Errorf("it is of another machine: %+v", s.Key)
	}
	if ppm := math.Abs(float64(s.TSCKHz-tscKHz)) / float64(tscKHz) * 1e6; ppm > tscTolerance {
		return nil, fmt.Errorf("it was saved with a time stamp counter of %d kHz, this host's has %d", s.TSCKHz, tscKHz)
	}
	if !digestForm.MatchString(s.State.Digest) || s.Memory.Digests == nil {
		return nil, errors.New("it lacks digests")
	}
	if s.Memory.Size != int64(key.Shape.MemoryMiB)<<20 {
		return nil, fmt.Errorf("its memory has %d bytes", s.Memory.Size)
	}
	if s.state, err = openSized(filepath.Join(dir, stateFile), s.State.Size); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = s.state.Close()
		}
	}()
	if s.State.Size > maxState {
		return nil, fmt.Errorf("its state has %d bytes", s.State.Size)
	}
	digest, err := sha256Of(s.state)
	if err != nil {
		return nil, err
	}
	if digest != s.State.Digest {
		return nil, errors.New("its state is damaged")
	}
	if s.memory, err = openSized(filepath.Join(dir, memoryFile), s.Memory.Size); err != nil {
		return nil, err
	}
	return s, nil
}

func openSized(path string, size int64) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && (!info.Mode().IsRegular() || info.Size() != size) {
		err = fmt.Errorf("%s has %d bytes, not %d", filepath.Base(path), info.Size(), size)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func readBounded(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("%s is larger than %d bytes", filepath.Base(path), limit)
	}
	return b, err
}

// sha256Of reads f from its start and leaves it there.
func sha256Of(f *os.File) (string, error) {
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(f, 0, maxState+1)); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
