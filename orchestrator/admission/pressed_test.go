package admission

import (
	"context"
	"errors"
	"io/fs"
	"runtime"
	"testing"
	"time"
)

// TestPressed: the kernel tells when something waits, here for the CPUs; whoever doesn't want to know any more isn't kept.
func TestPressed(t *testing.T) {
	p := &Proc{dir: "/proc"}
	over := errors.New("over")
	ctx, cancel := context.WithTimeoutCause(t.Context(), 50*time.Millisecond, over)
	defer cancel()
	err := p.Pressed(ctx, 100)
	if errors.Is(err, fs.ErrNotExist) {
		t.Skip(err)
	}
	if !errors.Is(err, over) {
		t.Errorf("nothing waits: %v", err)
	}
	// What was waited before is nobody's concern.
	const most = 500 * time.Millisecond
	earlier, end := context.WithTimeout(t.Context(), 2*most)
	defer end()
	spin(earlier, 4*runtime.NumCPU())
	<-earlier.Done()
	before, err := waited("/proc/pressure/cpu")
	if err != nil {
		t.Fatal(err)
	}
	little, done := context.WithTimeoutCause(t.Context(), 2*most, over)
	defer done()
	brief, end := context.WithTimeout(t.Context(), most/10)
	defer end()
	spin(brief, 4*runtime.NumCPU())
	err = p.pressed(little, "cpu", most, 10*time.Second)
	after, _ := waited("/proc/pressure/cpu")
	if err != nil && !errors.Is(err, over) || err == nil && after-before < most {
		t.Errorf("%v was waited: %v", after-before, err)
	}
	busy, stop := context.WithTimeout(t.Context(), 20*time.Second)
	defer stop()
	spin(busy, 4*runtime.NumCPU())
	if err := p.pressed(busy, "cpu", 50*time.Millisecond, 2*time.Second); err != nil {
		t.Errorf("%d threads on %d CPUs: %v", 4*runtime.NumCPU(), runtime.NumCPU(), err)
	}
	if err := (&Proc{dir: t.TempDir()}).Pressed(t.Context(), 20); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of a kernel that doesn't tell: %v", err)
	}
}

// spin has so many threads want a CPU until ctx ends.
func spin(ctx context.Context, n int) {
	before := runtime.GOMAXPROCS(n)
	context.AfterFunc(ctx, func() { runtime.GOMAXPROCS(before) })
	for range n {
		go func() {
			for ctx.Err() == nil {
			}
		}()
	}
}
