package memory

import (
	"errors"
	"strings"
	"testing"
)

// Of a memory that is written to there is one owner, wherever the descriptor has gone; and none of what is sealed.
func TestOwn(t *testing.T) {
	f, err := Scratch(ChunkSize)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	own, err := Own(f)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Own(f); !errors.Is(err, ErrOwned) {
		t.Errorf("a second owner: %v", err)
	}
	if _, err := Own(own); !errors.Is(err, ErrOwned) {
		t.Errorf("a second owner, by the first: %v", err)
	}
	if _, err := Common(f, ChunkSize); err == nil || !strings.Contains(err.Error(), "seals") {
		t.Errorf("in common, but not sealed: %v", err)
	}
	if err := own.Close(); err != nil {
		t.Fatal(err)
	}
	if own, err = Own(f); err != nil {
		t.Errorf("after the first owner's end: %v", err)
	}
	own.Close()

	sealed, _, err := Seal(f, ChunkSize)
	if err != nil {
		t.Fatal(err)
	}
	defer sealed.Close()
	for range 2 {
		common, err := Common(sealed, ChunkSize)
		if err != nil {
			t.Fatal(err)
		}
		defer common.Close()
		if _, err := common.WriteAt([]byte("x"), 0); err == nil {
			t.Error("what is common can be written to")
		}
	}
	if _, err := Common(sealed, 2*ChunkSize); err == nil || !strings.Contains(err.Error(), "size") {
		t.Errorf("of another size: %v", err)
	}
}
