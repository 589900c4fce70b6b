package process

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMemoryOf(t *testing.T) {
	const size = 32 << 20
	before, err := MemoryOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(b)
	after, err := MemoryOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	const slack = 8 << 20 // what else the runtime takes or gives back meanwhile
	for name, n := range map[string]int64{
		"private": int64(after.Private - before.Private), "resident": int64(after.Resident - before.Resident), "PSS": int64(after.PSS - before.PSS),
		"anonymous": int64(after.Anonymous - before.Anonymous),
	} {
		if n < size-slack || n > size+slack {
			t.Errorf("%s: %d bytes more", name, n)
		}
	}
	if _, err := MemoryOf(1 << 30); !os.IsNotExist(err) {
		t.Errorf("no process: %v", err)
	}
}
