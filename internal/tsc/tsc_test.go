package tsc

import (
	"math"
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
