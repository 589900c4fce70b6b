package memory

import (
	"encoding/binary"
	"errors"
	"io"
	"unsafe"

	"golang.org/x/sys/unix"
)

// written lists the runs of pages of the span that the process has a copy of its own of, as parts of the file. Where the
// kernel can (since 6.7) it does the search.
func (p *Private) written(s span) ([]segment, error) {
	runs, err := p.scan(s)
	if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EINVAL) {
		return p.read(s)
	}
	return runs, err
}

// pmScanArg and pageRegion are struct pm_scan_arg and struct page_region of linux/fs.h.
type pmScanArg struct {
	size, flags, start, end, walkEnd, vec, vecLen, maxPages           uint64
	categoryInverted, categoryMask, categoryAnyofMask, returnCategory uint64
}

type pageRegion struct{ start, end, categories uint64 }

const (
	pagemapScan = 0xc0606610 // _IOWR('f', 16, struct pm_scan_arg)

	pageIsFile    = 1 << 2
	pageIsPresent = 1 << 3
	pageIsSwapped = 1 << 4
)

// regionCount is how many regions are asked for at once.
const regionCount = 1024

// scan asks with PAGEMAP_SCAN.
func (p *Private) scan(s span) (runs []segment, err error) {
	regions := make([]pageRegion, regionCount)
	arg := pmScanArg{
		size:  uint64(unsafe.Sizeof(pmScanArg{})),
		start: uint64(s.addr), end: uint64(s.addr + s.len),
		vec: uint64(uintptr(unsafe.Pointer(&regions[0]))), vecLen: regionCount,
		// There, and not the file's.
		categoryInverted: pageIsFile, categoryMask: pageIsFile, categoryAnyofMask: pageIsPresent | pageIsSwapped,
		returnCategory: pageIsPresent | pageIsSwapped,
	}
	for arg.start < arg.end {
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, p.pagemap.Fd(), pagemapScan, uintptr(unsafe.Pointer(&arg)))
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return nil, errno
		}
		for _, r := range regions[:n] {
			runs = join(runs, segment{int64(r.start) - s.addr + s.off, int64(r.end) - s.addr + s.off})
		}
		if arg.walkEnd <= arg.start {
			return nil, io.ErrNoProgress
		}
		arg.start = arg.walkEnd
	}
	return runs, nil
}

// Bits of an entry of /proc/<pid>/pagemap (Documentation/admin-guide/mm/pagemap.rst).
const (
	entryBytes   = 8
	entryFile    = 1 << 61 // the file's, or shared
	entrySwapped = 1 << 62
	entryPresent = 1 << 63
)

// read looks at every page.
func (p *Private) read(s span) (runs []segment, err error) {
	buf := make([]byte, 256<<10)
	for at := int64(0); at < s.len; {
		b := buf[:min(int64(len(buf)), (s.len-at)/pageSize*entryBytes)]
		if _, err := p.pagemap.ReadAt(b, (s.addr+at)/pageSize*entryBytes); err != nil {
			return nil, err
		}
		for ; len(b) > 0; b = b[entryBytes:] {
			if e := binary.NativeEndian.Uint64(b); e&(entryPresent|entrySwapped) != 0 && e&entryFile == 0 {
				runs = join(runs, segment{s.off + at, s.off + at + pageSize})
			}
			at += pageSize
		}
	}
	return runs, nil
}
