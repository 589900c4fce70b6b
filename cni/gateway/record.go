package gateway

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
)

// record is what Down and the next Up need to know of an Up. It is written before anything is made.
type record struct {
	Network config.Network `json:"network"`
	// Forwarding is nil where the host forwarded before.
	Forwarding *forwarding `json:"forwarding,omitempty"`
	// Ruleset and InForce tell the rules that were installed, and how the kernel showed them then.
	Ruleset string `json:"ruleset,omitempty"`
	InForce string `json:"in_force,omitempty"`
}

func recordFile(dir string) string { return filepath.Join(dir, "gateway.json") }

// readRecord returns nil where there is none.
func readRecord(dir string) (*record, error) {
	b, err := os.ReadFile(recordFile(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("read the gateway's record: %w", err)
	}
	r := &record{}
	if err := json.Unmarshal(b, r); err != nil {
		return nil, fmt.Errorf("the gateway's record %s is damaged: %w; remove it, and by hand what it was about, or restart the host", recordFile(dir), err)
	}
	return r, nil
}

// write replaces the record as a whole.
func (r *record) write(dir string) error {
	b, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return fmt.Errorf("encode the gateway's record: %w", err)
	}
	tmp := recordFile(dir) + ".tmp"
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return fmt.Errorf("write the gateway's record: %w", err)
	}
	if err := os.Rename(tmp, recordFile(dir)); err != nil {
		return fmt.Errorf("write the gateway's record: %w", err)
	}
	return nil
}

// removeRecord removes the record, and the directory if nothing else is in it.
func removeRecord(dir string) error {
	if err := os.Remove(recordFile(dir)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the gateway's record: %w", err)
	}
	return removeDir(dir)
}

// removeDir removes the directory if nothing is in it.
func removeDir(dir string) error {
	if err := os.Remove(dir); err != nil && !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the gateway's directory: %w", err)
	}
	return nil
}

// sameObjects says whether both configurations have the same things in the kernel, if with other contents.
func sameObjects(a, b *config.Network) bool {
	return a.Pool == b.Pool && a.Device == b.Device && a.NFTable == b.NFTable && a.MarkMask == b.MarkMask &&
		a.RouteTable == b.RouteTable && a.RulePriority == b.RulePriority
}
