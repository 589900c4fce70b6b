package tsc

import (
	"math"
	"os"
	"path/filepath"
	"testing"
)

func TestKHz(t *testing.T) {
	a, err := KHz()
	if err != nil {
		t.Fatal(err)
	}
	b, err := KHz()
	if err != nil {
		t.Fatal(err)
	}
	if ppm := math.Abs(float64(a-b)) / float64(a) * 1e6; ppm > 250 {
		t.Fatalf("two measurements differ by %.0f ppm: %d and %d kHz", ppm, a, b)
	}
	t.Logf("%d and %d kHz", a, b)
}

func TestCached(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tsc")
	first, err := Cached(path)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := Cached(path); err != nil || again != first {
		t.Fatalf("%d, then %d, %v", first, again, err)
	}
	for _, stale := range []string{"", "another-boot 12345678\n", "x", "\x00"} {
		if err := os.WriteFile(path, []byte(stale), 0o600); err != nil {
			t.Fatal(err)
		}
		if khz, err := Cached(path); err != nil || khz == 12345678 {
			t.Fatalf("with %q: %d, %v", stale, khz, err)
		}
	}
}
