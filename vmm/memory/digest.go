package memory

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
)

// ErrDamaged says that a file isn't what its digests say.
var ErrDamaged = errors.New("damaged")

// Digests are the SHA-256 of each chunk of 1 MiB of a file, by its number. A chunk of zeros has none, whether it is a hole
// or not.
type Digests map[int64][sha256.Size]byte

// Digest reads a file of that size.
func Digest(f *os.File, size int64) (Digests, error) {
	list, err := chunks(f, size)
	if err != nil {
		return nil, err
	}
	return digest(f, size, list)
}

func digest(f *os.File, size int64, list []int64) (Digests, error) {
	var d digester
	err := forEachChunk(f, size, list, func(off int64, chunk []byte) error {
		d.add(off, chunk)
		return nil
	})
	return d.all(), err
}

// Update returns the digests of a file of that size, of which only the chunks listed may differ from what d says: it reads
// no more than those.
func (d Digests) Update(f *os.File, size int64, changed []int64) (Digests, error) {
	fresh, err := digest(f, size, changed)
	if err != nil {
		return nil, err
	}
	all := maps.Clone(d)
	if all == nil {
		all = make(Digests)
	}
	for _, n := range changed {
		delete(all, n)
	}
	maps.Copy(all, fresh)
	return all, nil
}

// Check reads a file of that size and returns an error that wraps ErrDamaged where it isn't what d says.
func (d Digests) Check(f *os.File, size int64) error {
	got, err := Digest(f, size)
	if err != nil {
		return err
	}
	return d.Compare(got)
}

// Compare returns an error that wraps ErrDamaged and says where the digests read differ from d.
func (d Digests) Compare(got Digests) error {
	numbers := slices.Concat(slices.Collect(maps.Keys(d)), slices.Collect(maps.Keys(got)))
	slices.Sort(numbers)
	for _, n := range numbers {
		if d[n] != got[n] {
			return fmt.Errorf("%w in its MiB %d", ErrDamaged, n)
		}
	}
	return nil
}

// String is one digest of all: equal for equal files of one size.
func (d Digests) String() string {
	h := sha256.New()
	h.Write(d.bytes())
	return hex.EncodeToString(h.Sum(nil))
}

// entrySize is a chunk's number and its digest.
const entrySize = 8 + sha256.Size

func (d Digests) bytes() []byte {
	b := make([]byte, 0, len(d)*entrySize)
	for _, n := range slices.Sorted(maps.Keys(d)) {
		sum := d[n]
		b = append(binary.BigEndian.AppendUint64(b, uint64(n)), sum[:]...)
	}
	return b
}

// MarshalText writes all digests in one word.
func (d Digests) MarshalText() ([]byte, error) {
	return base64.StdEncoding.AppendEncode(nil, d.bytes()), nil
}

// UnmarshalText reads what MarshalText writes, and nothing else.
func (d *Digests) UnmarshalText(text []byte) error {
	b, err := base64.StdEncoding.Strict().AppendDecode(nil, text)
	if err != nil {
		return fmt.Errorf("digests: %w", err)
	}
	if len(b)%entrySize != 0 {
		return fmt.Errorf("digests: %d bytes", len(b))
	}
	*d = make(Digests, len(b)/entrySize)
	last := int64(-1)
	for ; len(b) > 0; b = b[entrySize:] {
		n := int64(binary.BigEndian.Uint64(b))
		if n <= last {
			return fmt.Errorf("digests: chunk %d after %d", n, last)
		}
		(*d)[n] = [sha256.Size]byte(b[8:entrySize])
		last = n
	}
	return nil
}

// digester collects the digests of chunks, whatever order they come in. The zero value is ready.
type digester struct {
	mu   sync.Mutex
	sums Digests
}

// add may be called from many goroutines, each with chunks of its own.
func (d *digester) add(off int64, chunk []byte) {
	if isZero(chunk) {
		return
	}
	sum := sha256.Sum256(chunk)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.sums == nil {
		d.sums = make(Digests)
	}
	d.sums[off/ChunkSize] = sum
}

func (d *digester) all() Digests {
	if d.sums == nil {
		return Digests{}
	}
	return d.sums
}
