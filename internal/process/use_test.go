package process

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"testing"
	"time"
)

func TestUseOf(t *testing.T) {
	before, err := UseOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(os.Args[0][strings.LastIndexByte(os.Args[0], '/')+1:], before.Command) || before.Resident < 1<<20 || before.Resident > 1<<32 {
		t.Errorf("%+v", before)
	}
	began := time.Now()
	for {
		now, err := UseOf(os.Getpid())
		if err != nil {
			t.Fatal(err)
		}
		if now.CPU >= before.CPU+5*tick {
			break
		}
		if time.Since(began) > time.Minute {
			t.Fatalf("no CPU time in a minute: %+v", now)
		}
	}
	if _, err := UseOf(1 << 30); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of none: %v", err)
	}
}
