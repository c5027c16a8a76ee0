// Letters whose upper or title case is more than one code point: the unconditional rows of Unicode's SpecialCasing.txt
// (version 14; without U+1F80..U+1FAF, which follow a rule, see unicode_text.cc). Sorted by code point.
#pragma once

namespace nfp::jinja::unicode {

struct SpecialCase {
  char16_t letter;
  char16_t upper[4];  // zero-terminated
  char16_t title[4];
};

inline constexpr SpecialCase kSpecialCases[] = {
    {0x00DF, u"\x0053\x0053", u"\x0053\x0073"},
    {0x0149, u"\x02BC\x004E", u"\x02BC\x004E"},
    {0x01F0, u"\x004A\x030C", u"\x004A\x030C"},
    {0x0390, u"\x0399\x0308\x0301", u"\x0399\x0308\x0301"},
    {0x03B0, u"\x03A5\x0308\x0301", u"\x03A5\x0308\x0301"},
    {0x0587, u"\x0535\x0552", u"\x0535\x0582"},
    {0x1E96, u"\x0048\x0331", u"\x0048\x0331"},
    {0x1E97, u"\x0054\x0308", u"\x0054\x0308"},
    {0x1E98, u"\x0057\x030A", u"\x0057\x030A"},
    {0x1E99, u"\x0059\x030A", u"\x0059\x030A"},
    {0x1E9A, u"\x0041\x02BE", u"\x0041\x02BE"},
    {0x1F50, u"\x03A5\x0313", u"\x03A5\x0313"},
    {0x1F52, u"\x03A5\x0313\x0300", u"\x03A5\x0313\x0300"},
    {0x1F54, u"\x03A5\x0313\x0301", u"\x03A5\x0313\x0301"},
    {0x1F56, u"\x03A5\x0313\x0342", u"\x03A5\x0313\x0342"},
    {0x1FB2, u"\x1FBA\x0399", u"\x1FBA\x0345"},
    {0x1FB3, u"\x0391\x0399", u"\x1FBC"},
    {0x1FB4, u"\x0386\x0399", u"\x0386\x0345"},
    {0x1FB6, u"\x0391\x0342", u"\x0391\x0342"},
    {0x1FB7, u"\x0391\x0342\x0399", u"\x0391\x0342\x0345"},
    {0x1FBC, u"\x0391\x0399", u"\x1FBC"},
    {0x1FC2, u"\x1FCA\x0399", u"\x1FCA\x0345"},
    {0x1FC3, u"\x0397\x0399", u"\x1FCC"},
    {0x1FC4, u"\x0389\x0399", u"\x0389\x0345"},
    {0x1FC6, u"\x0397\x0342", u"\x0397\x0342"},
    {0x1FC7, u"\x0397\x0342\x0399", u"\x0397\x0342\x0345"},
    {0x1FCC, u"\x0397\x0399", u"\x1FCC"},
    {0x1FD2, u"\x0399\x0308\x0300", u"\x0399\x0308\x0300"},
    {0x1FD3, u"\x0399\x0308\x0301", u"\x0399\x0308\x0301"},
    {0x1FD6, u"\x0399\x0342", u"\x0399\x0342"},
    {0x1FD7, u"\x0399\x0308\x0342", u"\x0399\x0308\x0342"},
    {0x1FE2, u"\x03A5\x0308\x0300", u"\x03A5\x0308\x0300"},
    {0x1FE3, u"\x03A5\x0308\x0301", u"\x03A5\x0308\x0301"},
    {0x1FE4, u"\x03A1\x0313", u"\x03A1\x0313"},
    {0x1FE6, u"\x03A5\x0342", u"\x03A5\x0342"},
    {0x1FE7, u"\x03A5\x0308\x0342", u"\x03A5\x0308\x0342"},
    {0x1FF2, u"\x1FFA\x0399", u"\x1FFA\x0345"},
    {0x1FF3, u"\x03A9\x0399", u"\x1FFC"},
    {0x1FF4, u"\x038F\x0399", u"\x038F\x0345"},
    {0x1FF6, u"\x03A9\x0342", u"\x03A9\x0342"},
    {0x1FF7, u"\x03A9\x0342\x0399", u"\x03A9\x0342\x0345"},
    {0x1FFC, u"\x03A9\x0399", u"\x1FFC"},
    {0xFB00, u"\x0046\x0046", u"\x0046\x0066"},
    {0xFB01, u"\x0046\x0049", u"\x0046\x0069"},
    {0xFB02, u"\x0046\x004C", u"\x0046\x006C"},
    {0xFB03, u"\x0046\x0046\x0049", u"\x0046\x0066\x0069"},
    {0xFB04, u"\x0046\x0046\x004C", u"\x0046\x0066\x006C"},
    {0xFB05, u"\x0053\x0054", u"\x0053\x0074"},
    {0xFB06, u"\x0053\x0054", u"\x0053\x0074"},
    {0xFB13, u"\x0544\x0546", u"\x0544\x0576"},
    {0xFB14, u"\x0544\x0535", u"\x0544\x0565"},
    {0xFB15, u"\x0544\x053B", u"\x0544\x056B"},
    {0xFB16, u"\x054E\x0546", u"\x054E\x0576"},
    {0xFB17, u"\x0544\x053D", u"\x0544\x056D"},
};

}  // namespace nfp::jinja::unicode
