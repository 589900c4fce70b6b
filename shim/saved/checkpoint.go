package saved

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
)

// Checkpoint is all that is in the directory of a checkpoint. The snapshot that it names is there until somebody deletes
// it by name.
type Checkpoint struct {
	Format    int    `json:"format"`
	Snapshot  string `json:"snapshot"`
	Container string `json:"container"` // its id on the host
	// Time is when it was saved.
	Time time.Time `json:"time"`
	// Cold: the container begins anew with the disk, whatever is in its memory.
	Cold bool `json:"cold,omitempty"`
}

const (
	checkpointFile = "cube-checkpoint.json"
	unfinished     = ".new" // behind its name as long as it is being written
	maxCheckpoint  = 4 << 10
)

// Write writes the checkpoint to the directory, whole or not at all, in place of one that is there.
func (c Checkpoint) Write(dir string) error {
	c.Format = format
	b, err := json.Marshal(c)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("write the checkpoint: %w", err)
	}
	path := filepath.Join(dir, checkpointFile)
	if err := writeSynced(path+unfinished, b); err != nil {
		return fmt.Errorf("write the checkpoint: %w", err)
	}
	err = os.Rename(path+unfinished, path)
	if err == nil {
		err = syncDir(dir)
	}
	if err != nil {
		return fmt.Errorf("write the checkpoint: %w", err)
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func writeSynced(path string, b []byte) (err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if closed := f.Close(); err == nil {
		err = closed
	}
	return err
}

// ReadCheckpoint reads the checkpoint in a directory.
func ReadCheckpoint(dir string) (Checkpoint, error) {
	var c Checkpoint
	f, err := os.Open(filepath.Join(dir, checkpointFile))
	if err != nil {
		return c, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("%s has no checkpoint that this runtime has made: %v", dir, err))
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxCheckpoint))
	if err == nil {
		err = decode(b, &c)
	}
	if err != nil {
		return c, fmt.Errorf("the checkpoint %s: %w", f.Name(), err)
	}
	return c, nil
}
