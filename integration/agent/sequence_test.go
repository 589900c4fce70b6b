package agent

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"testing"
	"time"
)

// sequenceReader reads what sequence says, and checks that nothing is missing and nothing comes twice.
type sequenceReader struct {
	r    *bufio.Reader
	next int
	part string // of a line that hasn't come to its end
}

func newSequence(r io.Reader) *sequenceReader { return &sequenceReader{r: bufio.NewReader(r), next: 1} }

// from goes on with another stream, where the one before ended.
func (s *sequenceReader) from(r io.Reader) {
	s.r = bufio.NewReader(io.MultiReader(strings.NewReader(s.part), r))
	s.part = ""
}

func (s *sequenceReader) line() error {
	line, err := s.r.ReadString('\n')
	if err != nil {
		s.part = line
		return err
	}
	if line != fmt.Sprintf("%09d\n", s.next) {
		return fmt.Errorf("%q came after %d", line, s.next-1)
	}
	s.next++
	return nil
}

// read reads up to that number.
func (s *sequenceReader) read(t *testing.T, to int) {
	t.Helper()
	for s.next <= to {
		if err := s.line(); err != nil {
			t.Fatalf("after %d: %v", s.next-1, err)
		}
	}
}

// readRest reads to the end of the stream's session.
func (s *sequenceReader) readRest(t *testing.T) {
	t.Helper()
	for {
		if err := s.line(); errors.Is(err, io.ErrUnexpectedEOF) {
			return
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

// saidTime is the time, in seconds since 1970, that a line begins with.
func saidTime(t *testing.T, line string) time.Time {
	t.Helper()
	seconds, _, _ := strings.Cut(line, " ")
	n, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return time.Unix(n, 0)
}
