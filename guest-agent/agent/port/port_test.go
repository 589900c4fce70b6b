package port

import (
	"os"
	"path/filepath"
	"testing"
)

func TestFind(t *testing.T) {
	dir := t.TempDir()
	for device, name := range map[string]string{"vport0p1": "other\n", "vport0p2": "cube.agent\n"} {
		if err := os.Mkdir(filepath.Join(dir, device), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, device, "name"), []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "vport0p3"), 0o700); err != nil { // the host hasn't named it yet
		t.Fatal(err)
	}
	for name, want := range map[string]string{"cube.agent": "vport0p2", "cube": "", "none": ""} {
		if got, err := find(dir, name); got != want || err != nil {
			t.Errorf("%s: %q, %v, want %q", name, got, err, want)
		}
	}
}
